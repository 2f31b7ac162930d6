"""Keys that change while the server runs: the file is looked at again and again."""

from pathlib import Path
from typing import NamedTuple

from dflash_trt.errors import ServerError
from dflash_trt.serving.security import read_keys
from dflash_trt.serving.supervisor.process import Say


class _Stamp(NamedTuple):
    """What changes with a file's content; a program may set `modified` back."""

    inode: int
    size: int
    modified: int  # ns
    changed: int  # ns


class KeyFile:
    """The file of `serve`'s keys; None: there are none."""

    def __init__(self, path: Path | None, keys: tuple[str, ...], say: Say) -> None:
        """keys: those that are valid; the file may have changed since they were read."""
        self._path = path
        self._keys = keys
        self._say = say
        self._stamp: _Stamp | None = None

    def changed_keys(self) -> tuple[str, ...] | None:
        """Return the keys if they have changed; a file without keys leaves the old ones."""
        stamp = self._look()
        if self._path is None or stamp == self._stamp:
            return None
        self._stamp = stamp
        try:
            keys = read_keys(self._path)
        except ServerError as error:
            self._say(f"the keys stay as they are: {error}")
            return None
        if keys == self._keys:
            return None
        self._keys = keys
        self._say(f"{len(keys)} keys are valid over HTTP now; gRPC takes a new one from a restart")
        return keys

    def _look(self) -> _Stamp | None:
        if self._path is None:
            return None
        try:
            status = self._path.stat()  # of what a link leads to
        except OSError:
            return None
        return _Stamp(status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

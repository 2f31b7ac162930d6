"""Keys that change while the server runs: the file is looked at again and again."""

from pathlib import Path

from dflash_trt.errors import ServerError
from dflash_trt.serving.security import read_keys
from dflash_trt.serving.supervisor.process import Say


class KeyFile:
    """The file of `serve`'s keys; None: there are none."""

    def __init__(self, path: Path | None, say: Say) -> None:
        self._path = path
        self._say = say
        self._stamp = self._look()

    def changed_keys(self) -> tuple[str, ...] | None:
        """Return the keys if the file has changed; a file without keys leaves the old ones."""
        stamp = self._look()
        if self._path is None or stamp == self._stamp:
            return None
        self._stamp = stamp
        try:
            keys = read_keys(self._path)
        except ServerError as error:
            self._say(f"the keys stay as they are: {error}")
            return None
        self._say(f"{len(keys)} keys are valid over HTTP now; gRPC takes a new one from a restart")
        return keys

    def _look(self) -> tuple[int, int, int] | None:
        """Return what changes with the content: inode, size and time of change."""
        if self._path is None:
            return None
        try:
            status = self._path.stat()  # of what a link leads to
        except OSError:
            return None
        return status.st_ino, status.st_size, status.st_mtime_ns

"""What `serve` does beside its watch over Triton: the application's restarts, and changed keys."""

import time
from pathlib import Path
from typing import NamedTuple

from dflash_trt.errors import BuildError, ServerError
from dflash_trt.serving.log import Log
from dflash_trt.serving.security import read_keys
from dflash_trt.serving.supervisor.application import Application
from dflash_trt.serving.supervisor.process import Say

RETRY = 30.0  # seconds until an application that did not start is tried again


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


class Upkeep:
    """Call `look` several times a second, whatever `serve` waits for meanwhile."""

    def __init__(self, application: Application, keys: KeyFile, log: Log, say: Say) -> None:
        self._application = application
        self._keys = keys
        self._log = log
        self._say = say
        self._next_try = 0.0
        self._lost_lines = 0

    def look(self) -> None:
        """Do what is due now; waits for nothing but a pipe whose reader hangs, some seconds."""
        keys = self._keys.changed_keys()
        if keys is not None:
            self._application.change_keys(keys)
        if self._log.lost != self._lost_lines:
            self._lost_lines = self._log.lost
            self._application.tell_lost_lines(self._lost_lines)
        try:
            self._look_at_application()
        except (BuildError, ServerError, OSError) as error:
            self._application.kill()
            self._say(f"{error} It is tried again.")
            self._next_try = time.monotonic() + RETRY

    def _look_at_application(self) -> None:
        application = self._application
        if not application.has_started() or (code := application.poll()) is None:
            return
        if time.monotonic() < self._next_try:
            return
        self._say(f"the application ended (exit {code}); starting another")
        application.count_own_restart()
        application.launch(self._log)

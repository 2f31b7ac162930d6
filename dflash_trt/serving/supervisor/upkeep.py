"""What `serve` does beside its watch over Triton: the application's restarts, and changed keys."""

import time

from dflash_trt.errors import BuildError, ServerError
from dflash_trt.serving.log import Log
from dflash_trt.serving.supervisor.application import Application
from dflash_trt.serving.supervisor.key_file import KeyFile
from dflash_trt.serving.supervisor.process import Say

RETRY = 30.0  # seconds until an application that did not start is tried again


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

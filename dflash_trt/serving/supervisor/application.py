"""The HTTP application's process, controlled by `serve`."""

import os
import select
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from dflash_trt.builder.opened import OpenedBuild
from dflash_trt.errors import ServerError
from dflash_trt.serving.http import (
    LISTENING,
    ApplicationSettings,
    Phase,
    ServedDrafter,
    ServeState,
    codec,
    state_codec,
)
from dflash_trt.serving.log import Log
from dflash_trt.serving.ports import Ports, listen
from dflash_trt.serving.processes import die_with_parent
from dflash_trt.serving.security import Security
from dflash_trt.serving.supervisor.process import KILL_TIMEOUT

START_TIMEOUT = 60.0  # seconds
POLL = 0.25  # seconds
WRITE_TIMEOUT = 10.0  # seconds in which it reads some of a line
EXIT_TIME = 1.0  # seconds from the end of its output to its exit
STOP_TIMEOUT = 10.0  # seconds


@dataclass(frozen=True)
class _Start:
    log: Log
    count: int  # of the log's events before it
    deadline: float


class Application:
    """Holds the HTTP port from the start; ServerError if it is taken."""

    def __init__(
        self,
        build: OpenedBuild,
        http_port: int,
        triton: Ports,
        security: Security,
        response_store: int = 64,
        root_path: str = "",
    ) -> None:
        self._build = build
        self._process: subprocess.Popen[bytes] | None = None
        self._start: _Start | None = None  # while it does not listen
        self._state = ServeState(keys=security.keys)
        self._lock = threading.Lock()  # of the state and the pipe
        self._listener = listen("http", security.http_host, http_port)
        self._settings = ApplicationSettings(
            *(self._listener.fileno(), build.directory, triton, security),
            since=_now(),
            response_store=response_store,
            root_path=root_path,
        )

    def start(self, log: Log, give_up: threading.Event | None = None) -> None:
        """Start it and tell it the state; return before that once `give_up` is set.

        Raises ServerError if it does not, and BuildError if the build has changed.
        """
        self.launch(log)
        while not self.has_started(POLL):
            if give_up is not None and give_up.is_set():
                return

    def launch(self, log: Log) -> None:
        """Start it without waiting for it, see `has_started`; BuildError if the build has changed.

        Use it in a thread that lives as long as the application, which ends with it.
        """
        start = _Start(log, log.count(), time.monotonic() + START_TIMEOUT)
        self._build.check_unchanged()
        with self._lock:  # nobody may tell it a state before its settings
            self._start = start
            self._process = subprocess.Popen(
                [sys.executable, "-m", "dflash_trt.serving.http"],
                env=os.environ | log.environment | {"PYTHONSAFEPATH": "1"},  # no local modules
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log.fileno(),
                bufsize=0,
                pass_fds=[self._listener.fileno()],
                start_new_session=True,  # Ctrl-C reaches only us
                preexec_fn=die_with_parent,
            )
            assert self._process.stdin is not None
            os.set_blocking(self._process.stdin.fileno(), False)
            self._write(codec.dump_json(self._settings))  # arguments would reveal keys

    def has_started(self, seconds: float = 0.0) -> bool:
        """Return whether it listens, within `seconds`; tell it the state once it does.

        Raises ServerError if it has ended or takes too long, and BuildError if the build has
        changed.
        """
        start, process = self._start, self._process
        if start is None or process is None:
            return process is not None
        assert process.stdout is not None
        if not select.select([process.stdout], [], [], seconds)[0]:
            if time.monotonic() < start.deadline:
                return False
            raise self._failed(start)
        if process.stdout.readline().decode().strip() != LISTENING:
            raise self._failed(start)
        self._start = None
        self._build.check_unchanged()  # what it has read
        self._change()
        return True

    def _failed(self, start: _Start) -> ServerError:
        self._start = None
        if not self._ended_within(EXIT_TIME):
            self.kill()
        events = start.log.since(start.count)
        reason = events[-1].message if events else "it said nothing"
        hint = f"Read its log: {start.log.path}"
        return ServerError(f"the application did not start: {reason}", hint)

    def poll(self) -> int | None:
        return None if self._process is None else self._process.poll()

    def kill(self) -> None:
        """End a process that hangs; `poll` then tells that it has ended."""
        if self._process is not None:
            self._process.kill()

    def tell(self, phase: Phase) -> None:
        self._change(phase=phase)

    def change_keys(self, keys: tuple[str, ...]) -> None:
        self._change(keys=keys)

    def begin_drain(self, seconds: float) -> None:
        """Have it refuse new requests, and exit when none runs or after the time; does not wait."""
        self._change(phase="draining", drain_seconds=seconds)

    def tell_drafter(self, name: str, digest: str) -> None:
        """Say that the drafter of another build serves from now on."""
        drafter = ServedDrafter(name, digest, _now())
        self._change(drafters=(*self._state.drafters, drafter))

    def tell_lost_lines(self, count: int) -> None:
        """Say how many lines of the log could not be written."""
        self._change(lost_lines=count)

    def count_server_restart(self) -> None:
        self._change(server_restarts=self._state.server_restarts + 1)

    def count_own_restart(self) -> None:
        self._change(application_restarts=self._state.application_restarts + 1)

    def _change(self, **changes: Any) -> None:
        with self._lock:
            self._state = replace(self._state, **changes)
            self._write(state_codec.dump_json(self._state))

    def _ended_within(self, seconds: float) -> bool:
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.poll() is not None

    def stop(self, seconds: float = STOP_TIMEOUT) -> None:
        """End the process and running requests, at once after `seconds`, and free the port."""
        if self._process is not None:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            with suppress(BrokenPipeError):
                self._process.stdin.close()
            if not self._ended_within(seconds):
                self._process.kill()
                self._ended_within(KILL_TIMEOUT)
            self._process.stdout.close()
        self._listener.close()

    def _write(self, line: bytes) -> None:
        assert self._process is not None
        pipe = self._process.stdin
        assert pipe is not None
        left = memoryview(line + b"\n")
        with suppress(OSError):  # `poll` reports it
            while left:
                if not select.select([], [pipe], [], WRITE_TIMEOUT)[1]:
                    self._process.kill()  # it hangs, and `serve` would with it
                    return
                left = left[pipe.write(left) or 0 :]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")

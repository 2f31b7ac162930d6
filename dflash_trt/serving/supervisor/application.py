"""The HTTP application's process, controlled by `serve`."""

import os
import select
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import replace
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
EXIT_TIME = 1.0  # seconds from the end of its output to its exit
STOP_TIMEOUT = 10.0  # seconds


class Application:
    """Holds the HTTP port from the start; ServerError if it is taken."""

    def __init__(
        self,
        build: OpenedBuild,
        http_port: int,
        triton: Ports,
        security: Security,
        response_store: int = 64,
    ) -> None:
        self._build = build
        self._process: subprocess.Popen[bytes] | None = None
        self._state = ServeState(keys=security.keys)
        self._lock = threading.Lock()  # of the state and the pipe
        self._listener = listen("http", security.http_host, http_port)
        self._settings = ApplicationSettings(
            *(self._listener.fileno(), build.directory, triton, security),
            since=_now(),
            response_store=response_store,
        )

    def start(self, log: Log) -> None:
        """Start it, again if it died, and tell it the state.

        Raises ServerError if it does not, and BuildError if the build has changed.
        """
        start = log.count()
        self._build.check_unchanged()
        process = self._launch(log)
        if self._listens(process):
            self._build.check_unchanged()  # what it has read
            self._change()
            return
        if not self._ended_within(EXIT_TIME):
            process.kill()
        events = log.since(start)
        reason = events[-1].message if events else "it said nothing"
        raise ServerError(f"the application did not start: {reason}", f"Read its log: {log.path}")

    def _launch(self, log: Log) -> "subprocess.Popen[bytes]":
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
        self._write(codec.dump_json(self._settings))  # arguments would reveal keys
        return self._process

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

    def stop(self) -> None:
        """End the process and running requests, and free the port; takes bounded time."""
        if self._process is not None:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            with suppress(BrokenPipeError):
                self._process.stdin.close()
            if not self._ended_within(STOP_TIMEOUT):
                self._process.kill()
                self._ended_within(KILL_TIMEOUT)
            self._process.stdout.close()
        self._listener.close()

    def _write(self, line: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(OSError):  # `poll` reports it
            self._process.stdin.write(line + b"\n")

    def _listens(self, process: "subprocess.Popen[bytes]") -> bool:
        assert process.stdout is not None
        readable, _, _ = select.select([process.stdout], [], [], START_TIMEOUT)
        return bool(readable) and process.stdout.readline().decode().strip() == LISTENING


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")

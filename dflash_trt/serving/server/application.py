"""The HTTP application's process, controlled by `serve`."""

import json
import os
import select
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from dflash_trt.build import read_manifest
from dflash_trt.errors import ServerError
from dflash_trt.serving.app import LISTENING, ApplicationSettings, codec
from dflash_trt.serving.internal import die_with_parent
from dflash_trt.serving.log import Log
from dflash_trt.serving.ports import Ports, listen
from dflash_trt.serving.security import Security
from dflash_trt.serving.server.process import KILL_TIMEOUT

START_TIMEOUT = 60.0  # seconds
EXIT_TIME = 1.0  # seconds from the end of its output to its exit
STOP_TIMEOUT = 10.0  # seconds


class Application:
    """Holds the HTTP port from the start; ServerError if it is taken, BuildError if no build."""

    def __init__(
        self,
        directory: Path,
        http_port: int,
        triton: Ports,
        security: Security,
        response_store: int = 64,
    ) -> None:
        read_manifest(directory)
        self._process: subprocess.Popen[bytes] | None = None
        self._state = "unready"
        self._drafters: list[str] = []  # commands about each, told again after a restart
        self._listener = listen("http", security.http_host, http_port)
        self._settings = ApplicationSettings(
            *(self._listener.fileno(), directory, triton, security),
            since=_now(),
            response_store=response_store,
        )

    def start(self, log: Log) -> None:
        """Start it, again if it died, and tell it the last state; ServerError if it does not."""
        start = log.size()
        process = self._launch(log)
        if self._listens(process):
            for words in (*self._drafters, self._state):
                self._write(words)
            return
        if not self._ended_within(EXIT_TIME):
            process.kill()
        reason = next(reversed(log.since(start)), "it said nothing")
        raise ServerError(f"the application did not start: {reason}", f"Read its log: {log.path}")

    def _launch(self, log: Log) -> "subprocess.Popen[bytes]":
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dflash_trt.serving.app"],
            env=os.environ | {"PYTHONSAFEPATH": "1"},  # no local modules
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.fileno(),
            bufsize=0,
            pass_fds=[self._listener.fileno()],
            start_new_session=True,  # Ctrl-C reaches only us
            preexec_fn=die_with_parent,
        )
        self._write(codec.dump_json(self._settings).decode())  # arguments would reveal keys
        return self._process

    def poll(self) -> int | None:
        return None if self._process is None else self._process.poll()

    def kill(self) -> None:
        """End a process that hangs; `poll` then tells that it has ended."""
        if self._process is not None:
            self._process.kill()

    def tell(self, words: str) -> None:
        """Send a state: `ready` or `unready` for requests, or `drain SECONDS`, then exit."""
        self._state = words
        self._write(words)

    def tell_drafter(self, name: str, digest: str) -> None:
        """Say that the drafter of another build serves from now on."""
        words = json.dumps({"name": name, "digest": digest, "since": _now()})
        self._drafters.append(f"drafter {words}")
        self._write(self._drafters[-1])

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

    def _write(self, words: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(OSError):  # `poll` reports it
            self._process.stdin.write(f"{words}\n".encode())

    def _listens(self, process: "subprocess.Popen[bytes]") -> bool:
        assert process.stdout is not None
        readable, _, _ = select.select([process.stdout], [], [], START_TIMEOUT)
        return bool(readable) and process.stdout.readline().decode().strip() == LISTENING


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")

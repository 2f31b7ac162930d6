"""The HTTP application's process, controlled by `serve`."""

import os
import select
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from dflash_trt.build import read_manifest
from dflash_trt.errors import ServerError
from dflash_trt.serving.app import LISTENING, Settings, codec
from dflash_trt.serving.internal import die_with_parent
from dflash_trt.serving.log import Log
from dflash_trt.serving.ports import Ports, listen
from dflash_trt.serving.security import Security
from dflash_trt.serving.server.process import KILL_TIMEOUT

START_TIMEOUT = 60.0  # seconds
EXIT_TIME = 1.0  # seconds from the end of its output to its exit
STOP_TIMEOUT = 10.0  # seconds


class Application:
    """Holds the HTTP port from the start; `start` starts the process, again if it died.

    Raises ServerError if the port is taken, BuildError if `directory` is no build.
    """

    def __init__(self, directory: Path, http_port: int, triton: Ports, security: Security) -> None:
        """Open the port; triton: Triton's ports."""
        read_manifest(directory)
        self._process: subprocess.Popen[bytes] | None = None
        self._state = "unready"
        self._listener = listen("http", security.http_host, http_port)
        self._settings = Settings(self._listener.fileno(), directory, triton, security)

    def start(self, log: Log) -> None:
        """Start the process and wait until it listens; it takes the last state of `tell`.

        Raises ServerError with its last log line if it does not start.
        """
        start = log.size()
        process = self._launch(log)
        if self._listens(process):
            return self._write(self._state)
        if not self.wait(EXIT_TIME):
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
        """Return the exit code, None while it runs."""
        return None if self._process is None else self._process.poll()

    def tell(self, words: str) -> None:
        """Send a state: `ready` or `unready` for requests, or `drain SECONDS`, then exit."""
        self._state = words
        self._write(words)

    def wait(self, timeout: float) -> bool:
        """Return whether the process ended within `timeout` seconds."""
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
        return self._process.poll() is not None

    def stop(self) -> None:
        """End the process and running requests, and free the port; takes bounded time."""
        if self._process is not None:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            with suppress(BrokenPipeError):
                self._process.stdin.close()
            if not self.wait(STOP_TIMEOUT):
                self._process.kill()
                self.wait(KILL_TIMEOUT)
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

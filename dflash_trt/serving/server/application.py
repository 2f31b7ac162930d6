"""The HTTP application's process as `serve` sees it."""

import importlib.util
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
from dflash_trt.serving.log import FORM, Log
from dflash_trt.serving.ports import Ports, listen
from dflash_trt.serving.security import Security
from dflash_trt.serving.server.process import KILL_TIMEOUT

START_TIMEOUT = 60.0  # seconds
START_CRASHES = 2
EXIT_TIME = 1.0  # seconds from the end of its output to that of the process
STOP_TIMEOUT = 10.0  # seconds


class Application:
    """Listens on the HTTP port from the start on; `start` starts its process, anew if it died.

    Raises ServerError when the port is taken, BuildError when `directory` is no build.
    """

    def __init__(
        self, directory: Path, http_port: int, triton: Ports, security: Security, page: bool
    ) -> None:
        """triton: where Triton listens; page: whether there is one at /."""
        if importlib.util.find_spec("fastapi") is None:  # found, not imported
            raise ServerError(
                "`serve` needs the Python packages fastapi and uvicorn",
                "Run: pip install 'dflash-trt[server]'",
            )
        read_manifest(directory)
        self._process: subprocess.Popen[bytes] | None = None
        self._state = "unready"
        self._listener = listen("http", security.http_host, http_port)
        self._settings = Settings(self._listener.fileno(), directory, triton, security, page)

    def start(self, log: Log) -> None:
        """Return when it answers; it is ready once it is, or was, told so.

        It is started again when it is killed before that, twice at most. Raises ServerError when it
        does not start, with its last line, which is in `log`.
        """
        for _ in range(1 + START_CRASHES):
            start = log.size()
            process = self._launch(log)
            if self._listens(process):
                return self._write(self._state)
            if not self.wait(EXIT_TIME) or process.returncode >= 0:
                process.kill()
                break
        reason = next(reversed(log.since(start)), "it said nothing")
        raise ServerError(f"the application did not start: {reason}", f"Read its log: {log.path}")

    def _launch(self, log: Log) -> "subprocess.Popen[bytes]":
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dflash_trt.serving.app"],
            env=os.environ | {"PYTHONSAFEPATH": "1", FORM: log.form},  # nothing from where we are
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.fileno(),
            bufsize=0,
            pass_fds=[self._listener.fileno()],
            start_new_session=True,  # Ctrl-C reaches us; we tell it
            preexec_fn=die_with_parent,
        )
        self._write(codec.dump_json(self._settings).decode())  # keys: never among the arguments
        return self._process

    def poll(self) -> int | None:
        """Return the exit code of the process when it has ended."""
        return None if self._process is None else self._process.poll()

    def tell(self, words: str) -> None:
        """`ready`, `unready`, `drain SECONDS`: takes requests, or none, or ends when none runs."""
        self._state = words
        self._write(words)

    def wait(self, timeout: float) -> bool:
        """Return whether the process has ended within `timeout` seconds."""
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
        return self._process.poll() is not None

    def stop(self) -> None:
        """End the process, running requests too, and give the port back; bounded."""
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
        with suppress(OSError):  # `poll` says it
            self._process.stdin.write(f"{words}\n".encode())

    def _listens(self, process: "subprocess.Popen[bytes]") -> bool:
        assert process.stdout is not None
        readable, _, _ = select.select([process.stdout], [], [], START_TIMEOUT)
        return bool(readable) and process.stdout.readline().decode().strip() == LISTENING

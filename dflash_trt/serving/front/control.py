"""Control of the request handler by `serve` over a Unix socket, with a JSON line each way."""

import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from dflash_trt.serving.internal import RUNTIME, SOCKET, given

TIMEOUT = 2.0  # seconds
Command = Literal[
    "status",
    "drain",  # refuse new requests
    "end",  # refuse new requests, end the others with an error
    "hold",  # a new drafter is about to load: hold the prefix cache, which it has not seen
    "release",  # it is loaded
]


class Status(NamedTuple):
    """The request handler's state."""

    open: int  # sequences that run or wait
    progress: int  # tokens processed since it started


@dataclass(frozen=True)
class Control:
    """`serve`'s end of the socket at `path`."""

    path: Path

    def ask(self, command: Command) -> Status | None:
        """Return the state after the command; None without an answer in `TIMEOUT` seconds."""
        with suppress(OSError, ValueError, TypeError), socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(TIMEOUT)
            connection.connect(str(self.path))
            connection.sendall(json.dumps(command).encode() + b"\n")
            with connection.makefile("rb") as file:
                return Status(**json.loads(file.readline()))
        return None


class ControlServer:
    """The request handler's end; `answer` runs a command and returns the state after it."""

    def __init__(self, answer: Callable[[Command], Status]) -> None:
        self._answer = answer
        self._path = Path(given(RUNTIME)) / SOCKET  # in a directory that only this user can enter
        self._socket = socket.socket(socket.AF_UNIX)
        self._path.unlink(missing_ok=True)  # left by a process that was killed
        self._socket.bind(str(self._path))
        self._socket.listen()
        threading.Thread(target=self._run, name="control", daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        self._socket.close()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if self._socket.fileno() < 0:  # closed
                    return
                time.sleep(0.05)  # too many open files
                continue
            with closing(connection), suppress(OSError, ValueError):
                connection.settimeout(TIMEOUT)
                with connection.makefile("rb") as file:
                    status = self._answer(json.loads(file.readline()))
                connection.sendall(json.dumps(status._asdict()).encode() + b"\n")

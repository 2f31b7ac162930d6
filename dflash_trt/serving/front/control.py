"""Commands of `serve`: a JSON line each way over a Unix socket, for this user and root alone."""

import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

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
    """Sends commands to the request handler, whose socket is at `path`."""

    path: Path

    def ask(self, command: Command) -> Status | None:
        """Return the state after the command; None without an answer in `TIMEOUT` seconds."""
        with suppress(OSError, ValueError, TypeError):
            return Status(*ask(str(self.path), command, TIMEOUT))
        return None


def control_server(answer: Callable[[Command], Status]) -> "JsonServer":
    """Take commands in the request handler's process; `answer` returns the state after one."""
    path = Path(given(RUNTIME)) / SOCKET  # in a directory that only this user can enter
    path.unlink(missing_ok=True)  # left by a process that was killed
    return JsonServer(str(path), answer)


class JsonServer:
    """Answers messages at an address of Unix sockets in its own thread, one after the other."""

    def __init__(self, address: str, answer: Callable[[Any], Any]) -> None:
        """Listen; OSError if the address is taken."""
        self._answer = answer
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(address)
        self._socket.listen()
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)
        self._thread.start()

    def close(self, timeout: float = 0.0) -> None:
        """Refuse new messages, and wait up to `timeout` seconds for a running answer."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        self._socket.close()
        self._thread.join(timeout)

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
                _check_user(connection)
                connection.settimeout(TIMEOUT)
                with connection.makefile("rb") as file:
                    answer = self._answer(json.loads(file.readline()))
                connection.sendall(json.dumps(answer).encode() + b"\n")


def ask(address: str, message: Any, timeout: float | None = None) -> Any:
    """Return a `JsonServer`'s answer; OSError if none listens, ValueError if it ends before."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout)
        connection.connect(address)
        _check_user(connection)
        connection.sendall(json.dumps(message).encode() + b"\n")
        with connection.makefile("rb") as file:
            return json.loads(file.readline())


def _check_user(connection: socket.socket) -> None:
    """Raise ConnectionError unless this user or root is at the other end."""
    size = struct.calcsize("3i")  # process, user, group
    _, user, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    )
    if user not in (0, os.geteuid()):
        raise ConnectionError("another user is at the other end")

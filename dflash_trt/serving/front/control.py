"""Unix sockets between `serve` and its models, for this user and root alone.

Commands of `serve` are a JSON line each way; requests of `dflash_infer` are in `unary.py`.
"""

import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from dflash_trt.serving.internal import RUNTIME, SOCKET, env_value

TIMEOUT = 2.0  # seconds
Command = Literal[
    "status",
    "drain",  # refuse new requests
    "end",  # refuse new requests, end the others with an error
    "hold",  # a new drafter is about to load: hold the prefix cache, which it has not seen
    "release",  # it is loaded
]


class HandlerStatus(NamedTuple):
    open: int  # sequences that run or wait
    progress: int  # tokens processed since it started


def send_command(socket_path: Path, command: Command) -> HandlerStatus | None:
    """Return the state after the command; None without an answer in `TIMEOUT` seconds."""
    with suppress(OSError, ValueError, TypeError):
        return HandlerStatus(*ask(str(socket_path), command, TIMEOUT))
    return None


def control_server(answer: Callable[[Command], HandlerStatus]) -> "SocketServer":
    return json_server(runtime_socket(SOCKET), answer)


def runtime_socket(name: str) -> str:
    """Return a free address in a directory that only this user can enter."""
    path = Path(env_value(RUNTIME)) / name
    path.unlink(missing_ok=True)  # left by a process that was killed
    return str(path)


class SocketServer:
    """Calls `serve` with each connection to an address, one after the other in its own thread."""

    def __init__(self, address: str, serve: Callable[[socket.socket], None]) -> None:
        """Listen; OSError if the address is taken."""
        self._serve = serve
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(address)
        self._socket.listen()
        self._thread = threading.Thread(target=self._run, name="socket server", daemon=True)
        self._thread.start()

    def close(self, timeout: float = 0.0) -> None:
        """Refuse new connections, and wait up to `timeout` seconds for a running call."""
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
            try:
                _refuse_other_users(connection)
                self._serve(connection)
            except (OSError, ValueError):  # it left, or sent no JSON
                connection.close()


def json_server(address: str, answer: Callable[[Any], Any]) -> SocketServer:
    def serve(connection: socket.socket) -> None:
        with connection:
            connection.settimeout(TIMEOUT)
            with connection.makefile("rb") as file:
                result = answer(json.loads(file.readline()))
            connection.sendall(json.dumps(result).encode() + b"\n")

    return SocketServer(address, serve)


def ask(address: str, message: Any, timeout: float | None = None) -> Any:
    """Return a `json_server`'s answer; OSError if none listens, ValueError if it ends before."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout)
        connection.connect(address)
        _refuse_other_users(connection)
        connection.sendall(json.dumps(message).encode() + b"\n")
        with connection.makefile("rb") as file:
            return json.loads(file.readline())


def _refuse_other_users(connection: socket.socket) -> None:
    size = struct.calcsize("3i")  # process, user, group
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    _, user, _ = struct.unpack("3i", peer)
    if user not in (0, os.geteuid()):
        raise ConnectionError("another user is at the other end")

"""Unix sockets between processes of one server, for this user and root alone.

A message is one line of JSON, which nothing executes. The model `dflash` has one for commands of
`serve` and requests of `dflash_infer`.
"""

import json
import logging
import os
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from dflash_trt.serving.keys import env_value

log = logging.getLogger(__name__)

TIMEOUT = 2.0  # seconds for a message, or an answer to a command
PIECE = 2**16  # bytes
RUNTIME = "DFLASH_TRT_RUNTIME"  # names a directory of mode 0700
TEMPORARY = Path("/tmp")  # whatever TMPDIR is: Triton uses it, too, and a socket's path is short
RUNTIME_PREFIX = "dflash-trt-"
SOCKET = "dflash.sock"  # in it
Command = Literal[
    "status",
    "drain",  # refuse new requests
    "end",  # refuse new requests, end the others with an error
]


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
            except Exception as error:  # whatever one has sent, the next is served
                connection.close()
                if not isinstance(error, OSError):  # it left
                    log.warning("a message was not understood (%s)", type(error).__name__)


def json_server(address: str, answer: Callable[[Any], Any]) -> SocketServer:
    def serve(connection: socket.socket) -> None:
        with connection:
            result = answer(receive(connection, TIMEOUT))
            send(connection, result)

    return SocketServer(address, serve)


def ask(address: str, message: Any, timeout: float | None = None) -> Any:
    """Return a `json_server`'s answer; OSError if none listens, ValueError if it ends before."""
    with connect(address, timeout) as connection:
        send(connection, message)
        return receive(connection, timeout)


def connect(address: str, timeout: float | None = None) -> socket.socket:
    """Return a connection to a server of this user or root; OSError otherwise."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(timeout)
        connection.connect(address)
        _refuse_other_users(connection)
    except OSError:
        connection.close()
        raise
    return connection


def send(connection: socket.socket, message: Any) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def receive(connection: socket.socket, seconds: float | None) -> Any:
    """Return a message; TimeoutError if it is not whole in time, ValueError if it never will be."""
    deadline = None if seconds is None else time.monotonic() + seconds
    line = bytearray()
    while not line.endswith(b"\n"):
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("a message was not whole in time")
            connection.settimeout(left)
        piece = connection.recv(PIECE)
        if not piece:
            raise ValueError("the connection ended before a message")
        line += piece
    return json.loads(line)


class HandlerStatus(NamedTuple):
    open: int  # sequences that run or wait
    progress: int  # tokens processed since it started


def send_command(runtime: Path, command: Command) -> HandlerStatus | None:
    """Return the state after the command; None without an answer in `TIMEOUT` seconds."""
    try:
        return HandlerStatus(*ask(str(runtime / SOCKET), {"command": command}, TIMEOUT))
    except (OSError, ValueError, TypeError):
        return None


def load_drafter(runtime: Path, engine: Path, timeout: float) -> str:
    """Have the drafter in this directory serve; return why it does not, or "".

    Raises OSError or ValueError without an answer.
    """
    refusal: Any = ask(str(runtime / SOCKET), {"drafter": str(engine)}, timeout)
    return str(refusal)


def new_runtime() -> Path:
    """Return a new directory for this user alone, with a path short enough for a socket."""
    return Path(tempfile.mkdtemp(prefix=RUNTIME_PREFIX, dir=TEMPORARY))


def socket_path() -> Path:
    """Return the address of the model `dflash` in a process of this server."""
    return Path(env_value(RUNTIME)) / SOCKET


def _refuse_other_users(connection: socket.socket) -> None:
    size = struct.calcsize("3i")  # process, user, group
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    _, user, _ = struct.unpack("3i", peer)
    if user not in (0, os.geteuid()):
        raise ConnectionError("another user is at the other end")

"""Plain infer: how the process of `dflash_infer` calls the request handler in that of `dflash`.

Over a Unix socket, one request to a connection. A call of one Triton model by another will not do:
it cannot be cancelled, loses error codes, and in Triton 2.51 one with a decoupled answer crashes
the calling process now and then.
"""

import _thread
import json
import logging
import select
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np

from dflash_trt.serving.front.request_handler import RequestHandler
from dflash_trt.serving.front.request_output import RequestOutput
from dflash_trt.serving.internal import RUNTIME, SOCKET, given

log = logging.getLogger(__name__)


class UnaryServer:
    """Hands requests from the socket to the request handler, and the commands of `Control`."""

    def __init__(self, handler: RequestHandler) -> None:
        self._handler = handler
        self._socket = socket.socket(socket.AF_UNIX)
        _path().unlink(missing_ok=True)  # left by a process that was killed
        self._socket.bind(str(_path()))
        self._socket.listen(socket.SOMAXCONN)
        threading.Thread(target=self._accept, name="unary server", daemon=True).start()

    def close(self) -> None:
        """Takes no more; open requests go on."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        self._socket.close()
        _path().unlink(missing_ok=True)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if self._socket.fileno() < 0:  # closed
                    return
                time.sleep(0.05)  # too many open files
                continue
            try:  # `Thread.start` would wait for ever for one that has no memory to begin
                _thread.start_new_thread(self._serve, (connection,))
            except (RuntimeError, MemoryError):
                connection.close()  # which `UnaryCall.answer` raises an error for

    def _serve(self, connection: socket.socket) -> None:
        reply = _Reply(connection)
        try:
            asked = json.loads(_read(connection))
            if command := asked.get("control"):
                return reply.write(self._handler.control(command)._asdict())
            inputs = {name: _array(values) for name, values in asked["inputs"].items()}
            rest = asked["timeout"], asked["client"], asked["request_id"], asked["context"]
            self._handler.submit(inputs, reply, *rest)
        except Exception:
            log.exception("a plain request could not be read")
            reply.fail("INTERNAL", "The request could not be read. The server's log says why.")


class _Reply:
    """A `response_sender.Reply` over a connection, which it closes after one answer."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send(self, output: RequestOutput, *, last: bool) -> None:
        self.write(vars(output))

    def fail(self, code: str, message: str) -> None:
        self.write({"code": code, "message": message})

    def cancelled(self) -> bool:
        """The client sends nothing after its request: what can be read is the end."""
        return _readable(self._connection, 0.0)

    def write(self, value: Mapping[str, Any]) -> None:
        with suppress(OSError), closing(self._connection):  # the client may have gone
            self._connection.sendall(json.dumps(value).encode() + b"\n")


class UnaryCall:
    """A request of the process of `dflash_infer`."""

    def __init__(
        self,
        inputs: Mapping[str, "np.ndarray[Any, Any]"],
        timeout: float | None,
        client: str = "",
        request_id: str = "",
        context: Mapping[str, str] | None = None,
    ) -> None:
        """timeout: seconds; client: who asks; context: see `RequestHandler.submit`.

        OSError when the request handler is not there.
        """
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(str(_path()))
        asked = {
            "inputs": {name: _values(array) for name, array in inputs.items()},
            "timeout": timeout,
            "client": client,
            "request_id": request_id,
            "context": context,
        }
        self._connection.sendall(json.dumps(asked).encode() + b"\n")

    def wait(self, seconds: float) -> bool:
        """Whether the answer has begun to come."""
        return _readable(self._connection, seconds)

    def answer(self) -> RequestOutput | tuple[str, str]:
        """The whole answer, or an error's code and message; OSError when the server has died."""
        line = _read(self._connection)
        if not line.endswith(b"\n"):
            raise ConnectionResetError
        value = json.loads(line)
        return (value["code"], value["message"]) if "code" in value else RequestOutput(**value)

    def close(self) -> None:
        """Cancels the request if it has no answer yet."""
        self._connection.close()


def _path() -> Path:
    """In a directory that this user alone may enter."""
    return Path(given(RUNTIME)) / SOCKET


def _readable(connection: socket.socket, seconds: float) -> bool:
    poll = select.poll()  # `select` takes the first 1,024 files only
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _read(connection: socket.socket) -> bytes:
    with connection.makefile("rb") as file:
        return file.readline()


def _values(array: "np.ndarray[Any, Any]") -> list[Any]:
    """JSON has no bytes: each byte becomes the character of its number."""
    values = array.ravel().tolist()
    return [value.decode("latin-1") if isinstance(value, bytes) else value for value in values]


def _array(values: list[Any]) -> "np.ndarray[Any, Any]":
    if any(isinstance(value, str) for value in values):
        return np.array([value.encode("latin-1") for value in values], object)
    return np.array(values)

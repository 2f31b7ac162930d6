"""Plain infer: how the process of `dflash_infer` reaches the request handler in that of `dflash`.

Over the Unix socket of `dflash`, one request per connection. A call between Triton models cannot be
cancelled, loses error codes, and in Triton 2.51 a decoupled one sometimes crashes the calling
process. A call over the server's own gRPC takes 1 ms more.
"""

import base64
import logging
import select
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dflash_trt.serving.answer import Array, Chunk, to_arrays
from dflash_trt.serving.channel import (
    TIMEOUT,
    Command,
    HandlerStatus,
    SocketServer,
    connect,
    receive,
    send,
    socket_path,
)
from dflash_trt.serving.model.response_sender import Reply

log = logging.getLogger(__name__)

LOOK = 0.02  # minimum seconds between two checks for cancellation
LOOK_SHARE = 0.001  # seconds per waiting request: a check takes 0.04 ms
ANSWER_TIMEOUT = 10.0  # seconds for an answer that has begun
STRINGS = "bytes"  # the kind of arrays of strings
Arrays = Mapping[str, Array]
Answer = Arrays | tuple[str, str]  # output tensors, or an error's code and message
GONE = "UNAVAILABLE", "The model dflash is not running. Try again later."
NOT_READ = "The request could not be read. The server's log says why."


class Handler(Protocol):
    """The parts of `request_handler.RequestHandler` that are reached over the socket."""

    def control(self, command: Command) -> HandlerStatus: ...

    def load_drafter(self, engine: Path) -> None: ...

    def submit(
        self,
        inputs: Mapping[str, Array],
        reply: Reply,
        timeout: float | None,
        client: str,
        request_id: str,
    ) -> None: ...


def start_listener(handler: Handler) -> SocketServer:
    """Start the server of the model's socket; requests and a drafter are answered later."""

    def serve(connection: socket.socket) -> None:
        message = receive(connection, TIMEOUT)
        if "command" in message:
            _answer(connection, handler.control(message["command"]))
        elif "drafter" in message:
            load = partial(_load_drafter, connection, Path(message["drafter"]), handler)
            threading.Thread(target=load, daemon=True).start()
        else:
            _take(connection, message, handler)

    path = socket_path()
    path.unlink(missing_ok=True)  # left by a process that was killed
    return SocketServer(str(path), serve)


def _load_drafter(connection: socket.socket, engine: Path, handler: Handler) -> None:
    refusal = ""
    try:
        handler.load_drafter(engine)
    except Exception as error:
        log.exception("a drafter did not load")
        refusal = str(error)
    _answer(connection, refusal)


def _answer(connection: socket.socket, answer: Any) -> None:
    """Send the only answer of a connection."""
    with suppress(OSError), connection:  # the client may have left
        connection.settimeout(ANSWER_TIMEOUT)
        send(connection, answer)


def _take(connection: socket.socket, request: Mapping[str, Any], handler: Handler) -> None:
    reply = _Reply(connection)
    try:
        inputs = _from_json(request["inputs"])
        timeout, client = request["timeout"], request["client"]
        handler.submit(inputs, reply, timeout, client, request["request_id"])
    except Exception:
        log.exception("a request could not be read")
        reply.fail("INTERNAL", NOT_READ)


class _Reply:
    """`response_sender.Reply` over a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send(self, chunks: Sequence[Chunk], *, last: bool) -> None:
        _answer(self._connection, {"outputs": _to_json(to_arrays(chunks))})

    def fail(self, code: str, message: str) -> None:
        _answer(self._connection, {"code": code, "message": message})

    def cancelled(self) -> bool:
        """Return whether the connection has ended: nothing else follows a request."""
        return _is_readable(self._connection, 0.0)


def _is_readable(connection: socket.socket, seconds: float) -> bool:
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _to_json(values: Arrays) -> dict[str, Any]:
    return {name: _array_to_json(array) for name, array in values.items()}


def _array_to_json(array: Array) -> dict[str, Any]:
    shape = list(array.shape)
    if array.dtype == object:
        texts = [value.decode("latin-1") for value in array.ravel().tolist()]
        return {"kind": STRINGS, "shape": shape, "data": texts}
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {"kind": array.dtype.str, "shape": shape, "data": data}


def _from_json(values: Mapping[str, Any]) -> dict[str, Array]:
    return {name: _array_from_json(value) for name, value in values.items()}


def _array_from_json(value: Mapping[str, Any]) -> Array:
    if value["kind"] == STRINGS:
        array = np.empty(len(value["data"]), object)
        array[:] = [text.encode("latin-1") for text in value["data"]]
    else:
        array = np.frombuffer(base64.b64decode(value["data"]), np.dtype(value["kind"]))
    return array.reshape(value["shape"])


def infer(
    inputs: Arrays,
    timeout: float | None,
    client: str,
    request_id: str,
    cancelled: Callable[[], bool],
) -> Answer:
    """Return the answer to a request of `RequestHandler.submit`; stop once `cancelled`."""
    request = {
        "inputs": _to_json(inputs),
        "timeout": timeout,
        "client": client,
        "request_id": request_id,
    }
    try:
        with connect(str(socket_path())) as connection:
            send(connection, request)
            while not _is_readable(connection, max(LOOK, threading.active_count() * LOOK_SHARE)):
                if cancelled():
                    return "CANCELLED", "The request was cancelled."
            answer = receive(connection, ANSWER_TIMEOUT)
    except (OSError, ValueError):
        log.warning("the model dflash is not running", extra={"request_id": request_id})
        return GONE
    if "code" in answer:
        return answer["code"], answer["message"]
    return _from_json(answer["outputs"])

"""Plain infer: how the process of `dflash_infer` reaches the request handler in that of `dflash`.

Over a Unix socket, one request per connection. A call between Triton models cannot be cancelled,
loses error codes, and in Triton 2.51 a decoupled one sometimes crashes the calling process. A call
over the server's own gRPC takes 1 ms more.
"""

import logging
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import numpy as np

from dflash_trt.serving.front.control import SocketServer, runtime_socket
from dflash_trt.serving.front.request_output import RequestOutput, arrays
from dflash_trt.serving.internal import RUNTIME, env_value

log = logging.getLogger(__name__)

SOCKET = "infer.sock"
LOOK = 0.02  # minimum seconds between two checks for cancellation
LOOK_SHARE = 0.001  # seconds per waiting request: a check takes 0.04 ms
Arrays = Mapping[str, "np.ndarray[Any, Any]"]
Answer = Arrays | tuple[str, str]  # output tensors, or an error's code and message
GONE = "UNAVAILABLE", "The model dflash is not running. Try again later."
NOT_READ = "The request could not be read. The server's log says why."


def unary_server(submit: Callable[..., None]) -> SocketServer:
    """Start a server that calls `RequestHandler.submit` with what `ask` sends."""

    def serve(accepted: socket.socket) -> None:
        connection: Connection[Any, Any] = Connection(accepted.detach())
        reply = _Reply(connection)
        try:
            inputs, *rest = connection.recv()
            submit(inputs, reply, *rest)
        except Exception:
            log.exception("a request could not be read")
            reply.fail("INTERNAL", NOT_READ)

    return SocketServer(runtime_socket(SOCKET), serve)


class _Reply:
    """`response_sender.Reply` over a connection."""

    def __init__(self, connection: "Connection[Any, Any]") -> None:
        self._connection = connection

    def send(self, output: RequestOutput, *, last: bool) -> None:
        self._answer(arrays(output))

    def fail(self, code: str, message: str) -> None:
        self._answer((code, message))

    def cancelled(self) -> bool:
        return self._connection.poll()  # nothing follows a request but the connection's end

    def _answer(self, answer: Answer) -> None:
        with suppress(OSError), self._connection:  # the client may have left
            self._connection.send(answer)


def ask(
    inputs: Arrays,
    timeout: float | None,
    client: str,
    request_id: str,
    cancelled: Callable[[], bool],
) -> Answer:
    """Return the answer to a request of `RequestHandler.submit`; stop once `cancelled`."""
    try:
        with Client(str(Path(env_value(RUNTIME)) / SOCKET)) as connection:
            connection.send((inputs, timeout, client, request_id))
            while not connection.poll(max(LOOK, threading.active_count() * LOOK_SHARE)):
                if cancelled():
                    return "CANCELLED", "The request was cancelled."
            answer: Answer = connection.recv()
            return answer
    except (OSError, EOFError):
        log.warning("the model dflash is not running", extra={"request_id": request_id})
        return GONE

"""The middleware of each HTTP port: access, whole bodies, clients that have gone, draining."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dflash_trt.errors import UnavailableError
from dflash_trt.serving.request_id import HEADER, current, request_id
from dflash_trt.serving.tracing import http_span

BODY_LIMIT = 2_000_000  # bytes; Triton 2.51 survived 6 MB, sent in one piece
BODY_TIME = 10.0  # seconds in which a body must be here
BUFFER_LIMIT = 256_000_000  # bytes of all bodies at the same time

NOT_READY = "The server is not ready. Try again later."
STOPPING = "The server is stopping. Try again later."
FULL = "The server is full. Try again later."
FAILED = "The server failed. Its log says why."
PROBES = ("/health", "/live", "/ready", "/metrics")  # asked every few seconds: logged if they fail
GONE = 499  # in the log: the client left before its answer was complete

log = logging.getLogger(__name__)
access = logging.getLogger("dflash_trt.access")


@dataclass
class State:
    """What all ports share: whether requests are taken, and those that are running."""

    ready: bool = False
    draining: bool = False
    running: set["asyncio.Task[None]"] = field(default_factory=set)
    # gRPC, the longest silent first
    relays: dict[asyncio.Transport, None] = field(default_factory=dict)
    buffered: int = 0  # bytes of bodies
    drained: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def refusal(self) -> str:
        """Why no request is taken now; empty when they are."""
        return STOPPING if self.draining else "" if self.ready else NOT_READY

    def drain(self, seconds: float) -> None:
        """Refuses new requests; `drained` is set when none runs and no gRPC client is connected, or
        after the time."""
        self.draining = True
        asyncio.get_running_loop().call_later(seconds, self.drained.set)
        self.leave(None)

    def leave(self, task: "asyncio.Task[None] | None") -> None:
        if task:
            self.running.discard(task)
        if self.draining and not self.running and not self.relays:
            self.drained.set()

    def end(self) -> None:
        """Ends running requests, with an error to their clients."""
        self.draining = True
        self.drained.set()
        for task in self.running:
            task.cancel()


@dataclass(frozen=True)
class Door:
    """An ASGI middleware: reads whole bodies, and cancels a request whose client has gone.

    admit: a response that refuses a request before its body is read, or None; refuse: an error in
    the words of this API, from status and message; event: the same as the last event of a stream.
    """

    app: ASGIApp
    state: State
    admit: Callable[[HTTPConnection], Response | None]
    refuse: Callable[[int, str], Response]
    event: Callable[[int, str], bytes]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.monotonic()
        request = HTTPConnection(scope)
        current.set(request_id(request.headers.get(HEADER)))
        answer = _Answer(send, self.state)
        try:
            with http_span(scope["method"], scope["path"], request.headers, lambda: answer.code):
                await self._answer(request, receive, answer)
        finally:
            _log_access(scope, answer, time.monotonic() - began)

    async def _answer(self, request: HTTPConnection, receive: Receive, answer: "_Answer") -> None:
        scope = request.scope
        refusal = self.admit(request)
        if refusal is not None:
            return await refusal(scope, receive, answer.send)
        body = bytearray()
        try:
            problem = await asyncio.wait_for(self._read(receive, body), BODY_TIME)
        except TimeoutError:
            problem = 408, f"The body was not here within {BODY_TIME:.0f} s."
        try:
            if problem is None:
                problem = await self._run(scope, receive, bytes(body), answer)
            if problem is not None:
                await self._fail(scope, receive, answer, *problem)
        finally:
            self.state.buffered -= len(body)

    async def _read(self, receive: Receive, body: bytearray) -> tuple[int, str] | None:
        """Fills `body`; status and message if something is wrong with it."""
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return 400, "The client has gone."  # nobody reads it
            body += message["body"]
            self.state.buffered += len(message["body"])
            if len(body) > BODY_LIMIT:
                return 413, f"The body has more than {BODY_LIMIT} bytes."
            if self.state.buffered > BUFFER_LIMIT:
                return 503, FULL
            more = message["more_body"]
        return None

    async def _run(
        self, scope: Scope, receive: Receive, body: bytes, answer: "_Answer"
    ) -> tuple[int, str] | None:
        """Runs the application until it ends, the client has gone or the gateway stops."""
        given = [{"type": "http.request", "body": body, "more_body": False}]
        task = asyncio.current_task()
        assert task is not None

        async def replay() -> Message:
            if given:
                return given.pop()
            await asyncio.Event().wait()  # `watch` sees when the client has gone
            raise AssertionError

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            if not answer.complete:
                task.cancel()

        watching = asyncio.create_task(watch())
        self.state.running.add(task)
        try:
            await self.app(scope, replay, answer.send)
        except asyncio.CancelledError:
            return 503, STOPPING
        except UnavailableError as error:
            return 503, str(error)
        except Exception:
            log.exception("a request failed")
            return 500, FAILED
        finally:
            watching.cancel()
            self.state.leave(task)
        return None

    async def _fail(
        self, scope: Scope, receive: Receive, answer: "_Answer", status: int, message: str
    ) -> None:
        if not answer.started:
            response = self.refuse(status, message)
            if status == 408:  # the rest would be waited for
                response.headers["Connection"] = "close"
            await response(scope, receive, answer.send)
        elif answer.streams and not answer.complete:
            await answer.send({"type": "http.response.body", "body": self.event(status, message)})
        # the connection is closed where an answer is not complete


def _log_access(scope: Scope, answer: "_Answer", seconds: float) -> None:
    method, path = scope["method"], scope["raw_path"].decode("latin-1")[:200]
    status = answer.code
    if status == 200 and path.endswith(PROBES):
        return
    fields = {
        "method": method,
        "path": path,
        "status": status,
        "ms": round(seconds * 1000, 1),
        "client": scope["client"][0],
    }
    said = f"{method} {path} {status} {fields['ms']} ms"
    access.info("%s", said, extra={"fields": fields, "request_id": answer.request_id})


class _Answer:
    """How far an answer has come."""

    def __init__(self, send: Send, state: State) -> None:
        self._send = send
        self._state = state
        self.started = self.streams = self.complete = False
        self.status = 0
        self.request_id = current.get()

    @property
    def code(self) -> int:
        """The status, as the log has it."""
        return self.status if self.complete else GONE

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = dict(message["headers"])
            self.streams = headers.get(b"content-type", b"").startswith(b"text/event-stream")
            self.status, self.request_id = message["status"], current.get()  # it may have changed
            added = [(HEADER.encode(), self.request_id.encode())]
            if self._state.draining:
                added.append((b"connection", b"close"))
            message = {**message, "headers": [*message["headers"], *added]}
        await self._send(message)
        self.started = True
        self.complete = message["type"] == "http.response.body" and not message.get("more_body")

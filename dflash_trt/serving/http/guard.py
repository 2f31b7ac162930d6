"""ASGI middleware: who may ask, body limits, disconnects, draining, the access log."""

import asyncio
import json
import logging
import re
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dflash_trt.serving.http import ServeState
from dflash_trt.serving.http.connections import Connections
from dflash_trt.serving.http.failures import Failure
from dflash_trt.serving.http.page import OPEN
from dflash_trt.serving.security import KEY_HEADER, OWN_KEY_HEADER, host_name
from dflash_trt.serving.tracing import HEADER, current, valid_or_new_id

BODY_LIMIT = 2_000_000  # bytes; Triton 2.51 survived 6 MB, sent in one piece
OPEN_BODY_LIMIT = 1_000  # bytes, where no key is asked for
BODY_TIME = 10.0  # seconds in which a body must arrive
BUFFER_LIMIT = 256_000_000  # bytes of all bodies at once

NOT_READY = "The server is not ready. Try again later."
STOPPING = "The server is stopping. Try again later."
SERVER_FULL = "The server is full. Try again later."
FAILED = "The server failed. Its log says why."
KEY_MISSING = "The API key is missing or wrong."
COMPRESSED = "A compressed body is not taken: send it without Content-Encoding."
NOT_JSON = "Send the body as JSON, with the header Content-Type: application/json."
JSON_TYPE = re.compile(r"application/([\w.-]+\+)?json")
HEADERS = {  # of refusals, as RFC 9110 has them
    401: {"WWW-Authenticate": "Bearer"},
    415: {"Accept": "application/json", "Accept-Encoding": "identity"},
    503: {"Retry-After": "1"},
}
HEALTH = ("/health", "/v2/health/ready")
MODEL_READY = re.compile(r"/v2/models/[^/]+(/versions/[0-9]+)?/ready")
OPEN_PATHS = {*OPEN, *HEALTH, "/v2/health/live", "/metrics"}
PROBES = ("/health", "/live", "/ready", "/metrics")  # polled: only what is unexpected is logged
READING = ("GET", "HEAD", "OPTIONS")  # methods of requests that change nothing
Problem = tuple[int, str]  # status and message
GONE = 499  # logged if the client left before its answer was complete

log = logging.getLogger(__name__)
access = logging.getLogger("dflash_trt.access")


@dataclass
class State:
    """Whether the server takes requests, and the running ones."""

    connections: Connections
    serve: ServeState = field(default_factory=ServeState)
    draining: bool = False
    # by HTTP status; one is there from the start, as Prometheus wants
    answers: Counter[int] = field(default_factory=lambda: Counter({200: 0}))
    running: set["asyncio.Task[None]"] = field(default_factory=set)
    buffered: int = 0  # bytes of bodies
    drained: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_ready(self) -> bool:
        """Whether proxies should send requests here."""
        return self.serve.phase == "ready" and not self.draining

    @property
    def reason_to_refuse(self) -> str:
        if self.draining:
            return STOPPING
        return "" if self.serve.phase in ("ready", "leaving") else NOT_READY

    def change(self, serve: ServeState) -> None:
        self.serve = serve
        if serve.phase == "draining":
            self.drain(serve.drain_seconds)

    def drain(self, seconds: float) -> None:
        """Refuse new requests; set `drained` when none runs, or after the time."""
        self.draining = True
        asyncio.get_running_loop().call_later(seconds, self.drained.set)
        self._set_if_drained()

    def leave(self, task: "asyncio.Task[None]") -> None:
        self.running.discard(task)
        self._set_if_drained()

    def cancel_running(self) -> None:
        self.draining = True
        for task in self.running:
            task.cancel()

    def _set_if_drained(self) -> None:
        if self.draining and not self.running:
            self.drained.set()


@dataclass(frozen=True)
class Doors:
    """Who may ask: keys, and without a key the names and pages that a browser may come from.

    On loopback without a key any web page that a browser of this machine shows could ask.
    """

    own_key: str  # that `serve` sends
    hosts: frozenset[str] | None  # names by which clients may call this machine; None: any
    origins: frozenset[str]  # of other web pages that may ask; "*": all

    def refusal(self, request: HTTPConnection) -> Problem | None:
        """Return why a request is refused; the key is asked for elsewhere."""
        if self.hosts is None or self.is_own(request):
            return None
        host = request.headers.get("host", "")
        name = host_name(host)
        if name and name not in self.hosts:
            return 403, (
                f"This server is not called {name[:80]!r}: ask for 127.0.0.1 or localhost, or start"
                " it with --allow-host or a key."
            )
        origin = request.headers.get("origin")
        changes = request.scope["method"] not in READING
        if origin is None or not changes or {origin, "*"} & self.origins:
            return None
        if origin.partition("://")[2].lower() == host.lower():
            return None
        return 403, (
            f"Pages of {origin[:80]!r} may not ask this server: start it with --allow-origin or a "
            "key."
        )

    def has_key(self, request: HTTPConnection, keys: Sequence[str]) -> bool:
        if not keys or self.is_own(request):
            return True
        shown = shown_key(request).encode()
        return any(secrets.compare_digest(shown, key.encode()) for key in keys)

    def is_own(self, request: HTTPConnection) -> bool:
        """Return whether `serve` itself asks."""
        shown = request.headers.get(OWN_KEY_HEADER, "")
        return secrets.compare_digest(shown.encode(), self.own_key.encode())


def shown_key(request: HTTPConnection) -> str:
    scheme, _, shown = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        shown = request.headers.get(KEY_HEADER, "")
    return shown.strip()


@dataclass(frozen=True)
class Guard:
    app: ASGIApp
    state: State
    doors: Doors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = time.monotonic()
        request = HTTPConnection(scope)
        current.set(valid_or_new_id(request.headers.get(HEADER)))
        answer = _Sender(send, self.state)
        try:
            refusal = self._refuse_before_body(request)
            if refusal is None:
                await self._answer(scope, receive, answer)
            else:
                await refusal(scope, receive, answer.send)
        finally:
            status = answer.status if answer.complete else GONE
            probe = self.doors.is_own(request) or scope["path"].endswith(PROBES)
            expected = status == 200 or (status == 503 and not self.state.is_ready)
            if not probe or not expected:
                self.state.answers[status] += 1
                _log_access(scope, status, time.monotonic() - start)

    def _refuse_before_body(self, request: HTTPConnection) -> Response | None:
        path, method = request.scope["path"], request.scope["method"]
        is_own = self.doors.is_own(request)
        request.state.is_own = is_own
        problem = self.doors.refusal(request)
        if problem is not None:
            return _refuse(path, *problem)
        reason = self._reason_to_refuse(is_own)
        ready = self.state.is_ready or (is_own and not self.state.draining)
        if not ready and (path in HEALTH or MODEL_READY.fullmatch(path)):
            return Response(status_code=503 if path == "/health" else 400)  # as Triton does
        if self.state.connections.full and not is_own and path not in HEALTH:
            return _refuse(path, 503, SERVER_FULL)
        if _is_open(path, method):
            return None
        if not self.doors.has_key(request, self.state.serve.keys):
            return _refuse(path, 401, KEY_MISSING)
        encoding = request.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("identity", ""):
            return _refuse(path, 415, f"{COMPRESSED} It is said to be {encoding[:40]!r}.")
        if method == "POST" and path.startswith("/v1") and not _is_json(request):
            kind = request.headers.get("content-type", "")
            return _refuse(path, 415, f"{NOT_JSON} It is {kind[:80]!r}." if kind else NOT_JSON)
        return _refuse(path, 503, reason) if reason else None

    def _reason_to_refuse(self, is_own: bool) -> str:
        """Return why no request is taken now; `serve` asks a server that is not ready."""
        if is_own and not self.state.draining:
            return ""
        return self.state.reason_to_refuse

    async def _answer(self, scope: Scope, receive: Receive, answer: "_Sender") -> None:
        body = bytearray()
        limit = OPEN_BODY_LIMIT if _is_open(scope["path"], scope["method"]) else BODY_LIMIT
        try:
            async with asyncio.timeout(BODY_TIME):
                problem = await self._fill(receive, body, limit)
        except TimeoutError:
            problem = 408, f"The body was not here within {BODY_TIME:.0f} s."
        try:
            if problem is None:
                problem = await self._run(scope, receive, bytes(body), answer)
            if problem is not None:
                await _fail(scope, receive, answer, *problem)
        finally:
            self.state.buffered -= len(body)

    async def _fill(self, receive: Receive, body: bytearray, limit: int) -> Problem | None:
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return 400, "The client has gone."  # nobody reads the response
            body += message["body"]
            self.state.buffered += len(message["body"])
            if len(body) > limit:
                return 413, f"The body has more than {limit} bytes."
            if self.state.buffered > BUFFER_LIMIT:
                return 503, SERVER_FULL
            more = message.get("more_body", False)
        return None

    async def _run(
        self, scope: Scope, receive: Receive, body: bytes, answer: "_Sender"
    ) -> Problem | None:
        """Run the application until it ends, the client disconnects or the process stops."""
        given = [{"type": "http.request", "body": body, "more_body": False}]
        task = asyncio.current_task()
        assert task is not None

        async def replay() -> Message:
            if given:
                return given.pop()
            await asyncio.Event().wait()  # `watch` notices a disconnect
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
        except Exception:
            log.exception("a request failed")
            return 500, FAILED
        finally:
            watching.cancel()
            self.state.leave(task)
        return None


class _Sender:
    def __init__(self, send: Send, state: State) -> None:
        self._send = send
        self._state = state
        self.started = self.streams = self.complete = False
        self.status = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = dict(message["headers"])
            self.streams = headers.get(b"content-type", b"").startswith(b"text/event-stream")
            self.status = message["status"]
            added = [(HEADER.encode(), current.get().encode())]
            if not self._state.is_ready:
                added.append((b"connection", b"close"))
            message = {**message, "headers": [*message["headers"], *added]}
        await self._send(message)
        self.started = True
        self.complete = message["type"] == "http.response.body" and not message.get("more_body")


async def _fail(scope: Scope, receive: Receive, answer: _Sender, status: int, message: str) -> None:
    if not answer.started:
        response = _refuse(scope["path"], status, message)
        if status == 408:  # do not wait for the rest of the body
            response.headers["Connection"] = "close"
        await response(scope, receive, answer.send)
    elif answer.streams and not answer.complete:
        event = f"data: {json.dumps(_error_body(scope['path'], status, message))}\n\n"
        event += "" if scope["path"].startswith("/v2") else "data: [DONE]\n\n"
        await answer.send({"type": "http.response.body", "body": event.encode()})
    # an incomplete answer closes the connection


def _is_open(path: str, method: str) -> bool:
    """Return whether no key is asked for."""
    return path in OPEN_PATHS or (method == "GET" and path.startswith("/v2"))


def _is_json(request: HTTPConnection) -> bool:
    """Return whether the body is JSON, or there is none."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind:
        return JSON_TYPE.fullmatch(kind) is not None
    length = request.headers.get("content-length", "0")
    return length == "0" and "transfer-encoding" not in request.headers


def _error_body(path: str, status: int, message: str) -> dict[str, object]:
    return {"error": message} if path.startswith("/v2") else Failure(status, message).body()


def _refuse(path: str, status: int, message: str) -> Response:
    return JSONResponse(_error_body(path, status, message), status, HEADERS.get(status))


def _log_access(scope: Scope, status: int, seconds: float) -> None:
    method, path = scope["method"], scope["raw_path"].decode("latin-1")[:200]
    access.info("%s %s %d %.1f ms", method, path, status, seconds * 1000)

"""ASGI middleware: body limits, disconnects, the access log."""

import asyncio
import json
import logging
import time
from dataclasses import dataclass

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dflash_trt.serving.http.access import SERVER_FULL, Access, Problem, error_body, is_open, refuse
from dflash_trt.serving.http.state import STOPPING, State
from dflash_trt.serving.tracing import HEADER, current, valid_or_new_id

BODY_LIMIT = 2_000_000  # bytes; Triton 2.51 survived 6 MB, sent in one piece
OPEN_BODY_LIMIT = 1_000  # bytes, where no key is asked for
BODY_TIME = 10.0  # seconds in which a body must arrive
BUFFER_LIMIT = 256_000_000  # bytes of all bodies at once

FAILED = "The server failed. Its log says why."
PROBES = ("/health", "/live", "/ready", "/metrics")  # polled: only what is unexpected is logged
GONE = 499  # logged if the client left before its answer was complete

log = logging.getLogger(__name__)
access_log = logging.getLogger("dflash_trt.access")


@dataclass(frozen=True)
class Guard:
    app: ASGIApp
    state: State
    access: Access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = time.monotonic()
        request = HTTPConnection(scope)
        current.set(valid_or_new_id(request.headers.get(HEADER)))
        answer = _Sender(send, self.state)
        try:
            refusal = self.access.refusal_before_body(request, self.state)
            if refusal is None:
                await self._answer(scope, receive, answer)
            else:
                await refusal(scope, receive, answer.send)
        finally:
            status = answer.status if answer.complete else GONE
            probe = self.access.is_own(request) or scope["path"].endswith(PROBES)
            expected = status == 200 or (status == 503 and not self.state.is_ready)
            if not probe or not expected:
                self.state.answers[status] += 1
                _log_access(scope, status, time.monotonic() - start)

    async def _answer(self, scope: Scope, receive: Receive, answer: "_Sender") -> None:
        body = bytearray()
        limit = OPEN_BODY_LIMIT if is_open(scope["path"], scope["method"]) else BODY_LIMIT
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
        response = refuse(scope["path"], status, message)
        if status == 408:  # do not wait for the rest of the body
            response.headers["Connection"] = "close"
        await response(scope, receive, answer.send)
    elif answer.streams and not answer.complete:
        event = f"data: {json.dumps(error_body(scope['path'], status, message))}\n\n"
        event += "" if scope["path"].startswith("/v2") else "data: [DONE]\n\n"
        await answer.send({"type": "http.response.body", "body": event.encode()})
    # an incomplete answer closes the connection


def _log_access(scope: Scope, status: int, seconds: float) -> None:
    method, path = scope["method"], scope["raw_path"].decode("latin-1")[:200]
    access_log.info("%s %s %d %.1f ms", method, path, status, seconds * 1000)

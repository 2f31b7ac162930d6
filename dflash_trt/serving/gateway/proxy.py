"""Triton's HTTP API: requests are checked and passed on, streams as they come."""

import json
from contextlib import AbstractAsyncContextManager

import aiohttp
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send
from yarl import URL

from dflash_trt.errors import RequestError, UnavailableError
from dflash_trt.serving import tracing
from dflash_trt.serving.client.fields import MODEL
from dflash_trt.serving.gateway.checks import checked
from dflash_trt.serving.gateway.door import Door, State
from dflash_trt.serving.gateway.routes import Refusal, Route, check_access, find
from dflash_trt.serving.internal import client_parameters
from dflash_trt.serving.ports import LOOPBACK
from dflash_trt.serving.request_id import HEADER, current
from dflash_trt.serving.security import GATEWAY_KEY, Security

PUBLIC = (MODEL, f"{MODEL}_infer")  # the models whose fields are known
JSON_SIZE = "inference-header-content-length"
PASSED_BACK = ("Content-Type", "Content-Length", "Inference-Header-Content-Length")
CONNECT_TIME = 5.0  # seconds
UNPARSED = b'{"error":"Unable to parse '


def triton_door(
    port: int, security: Security, state: State, session: aiohttp.ClientSession
) -> Door:
    """Triton's HTTP on `port` of this machine; the client's address becomes a parameter."""

    def admit(request: HTTPConnection) -> Response | None:
        route = _route(request.scope)
        if isinstance(route, Refusal):
            return refuse(route.status, route.message)
        if route.action == "live":
            return Response()
        if route.action == "ready" and state.refusal:
            return Response(status_code=400)  # as Triton does
        try:
            check_access(route, request.headers, security)
        except Refusal as refusal:
            return refuse(refusal.status, refusal.message)
        if request.headers.get("content-encoding", "identity") != "identity":
            return refuse(415, "A compressed body is not taken. Send it as it is.")
        return refuse(503, state.refusal) if state.refusal else None

    async def forward(scope: Scope, receive: Receive, send: Send) -> None:
        request, route = Request(scope, receive), _route(scope)
        assert isinstance(route, Route)  # it was admitted
        trace = tracing.current()
        headers = {**tracing.sampled(trace or request.headers), GATEWAY_KEY: security.own_key}
        body = None
        if request.method == "POST":
            size = request.headers.get(JSON_SIZE)
            who = client_parameters(scope["client"][0], security.client_key) | trace
            try:
                body, json_size, name = checked(
                    await request.body(),
                    route.action,
                    size,
                    who,
                    request.headers.get(HEADER),
                    ours=route.model in PUBLIC,
                )
            except RequestError as error:
                return await refuse(400, str(error))(scope, receive, send)
            if size is not None:
                headers[JSON_SIZE] = str(json_size)
            current.set(name)
        url = URL(f"http://{LOOPBACK}:{port}{scope['raw_path'].decode()}", encoded=True)
        await _forward(session.request(request.method, url, data=body, headers=headers), send)

    return Door(forward, state, admit, refuse, event)


def metrics_door(port: int, state: State, session: aiohttp.ClientSession) -> Door:
    """Triton's metrics on `port` of this machine, while it runs."""

    def admit(request: HTTPConnection) -> Response | None:
        known = request.scope["method"] == "GET" and request.scope["path"] == "/metrics"
        return None if known else refuse(404, "Not Found")

    async def forward(_scope: Scope, _receive: Receive, send: Send) -> None:
        await _forward(session.get(f"http://{LOOPBACK}:{port}/metrics"), send)

    return Door(forward, state, admit, refuse, event)


def open_session() -> aiohttp.ClientSession:
    """To Triton: any number of connections, and no headers but those that clients sent."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIME),
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent"),
        auto_decompress=False,
    )


def refuse(status: int, message: str) -> Response:
    """As Triton words it."""
    headers = {"Retry-After": "1"} if status == 503 else {}
    return JSONResponse({"error": message}, status, headers)


def event(_status: int, message: str) -> bytes:
    return f"data: {json.dumps({'error': message})}\n\n".encode()


def _route(scope: Scope) -> Route | Refusal:
    try:
        return find(scope["method"], scope["raw_path"].decode())
    except Refusal as refusal:
        return refusal


async def _forward(
    request: AbstractAsyncContextManager[aiohttp.ClientResponse], send: Send
) -> None:
    try:
        async with request as answer:
            await _pass_back(answer, send)
    except aiohttp.ClientError:
        raise UnavailableError("The server does not answer", "Try again later") from None


async def _pass_back(answer: aiohttp.ClientResponse, send: Send) -> None:
    status, begin = answer.status, b""
    if status == 500:
        begin = await answer.read()
        status = 400 if begin.startswith(UNPARSED) else 500  # the request is wrong, not Triton
    headers = [
        (name.lower().encode(), answer.headers[name].encode())
        for name in PASSED_BACK
        if name in answer.headers
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": begin, "more_body": True})
    async for chunk in answer.content.iter_any():
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b""})

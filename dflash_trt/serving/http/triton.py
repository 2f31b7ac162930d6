"""Proxy to Triton's HTTP on loopback: public models, health, metadata and metrics.

A body is forwarded in one piece, after a check that Triton 2.51 can stand it (`triton_body.py`).
"""

import re
from contextlib import suppress

import httpcore
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from dflash_trt.errors import RequestError
from dflash_trt.serving.http.bodies import read_off_the_loop
from dflash_trt.serving.http.triton_body import Body, generate_body, infer_body, json_size_of
from dflash_trt.serving.keys import client_parameters
from dflash_trt.serving.ports import LOOPBACK, Ports
from dflash_trt.serving.refusals import refusal_status, retry_after
from dflash_trt.serving.security import Security
from dflash_trt.serving.tracing import CONTEXT, HEADER, current

MODEL = r"/v2/models/(?:dflash|dflash_infer)(?:/versions/[0-9]{1,9})?"
ROUTES = {
    "GET": re.compile(rf"/v2/?|/v2/health/(?:live|ready)|{MODEL}(?:/(?:ready|config|stats))?"),
    "POST": re.compile(rf"{MODEL}/(infer|generate|generate_stream)"),
}
OTHER_MODEL = re.compile(r"/v2/models/([^/]{1,64})(?:/.*)?")
JSON_SIZE = "inference-header-content-length"
PASSED_ON = ("content-type", *CONTEXT)
MAX_HEADER = 1024  # characters of one that is passed on; W3C Trace Context asks for 512
PASSED_BACK = (b"content-type", b"content-length", JSON_SIZE.encode())
CONNECT_TIMEOUT = 5.0  # seconds
READ_TIMEOUT = 2.0  # seconds, of what needs no model
UNREACHABLE = (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException)
UNPARSED = b'{"error":"Unable to parse '


class TritonProxy:
    def __init__(self, triton: Ports, security: Security) -> None:
        self._url = f"http://{LOOPBACK}:{triton.http}"
        self._metrics_url = f"http://{LOOPBACK}:{triton.metrics}/metrics"
        self._headers = {"host": LOOPBACK, **security.http_headers}
        self._client_key = security.client_key
        self._pool = httpcore.AsyncConnectionPool(
            max_connections=None, max_keepalive_connections=100, keepalive_expiry=60
        )

    async def __aenter__(self) -> "TritonProxy":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._pool.aclose()

    async def is_ready(self) -> bool:
        """Return Triton's own readiness, which stays when model processes die."""
        response = await self._get(f"{self._url}/v2/health/ready")
        return response is not None and response.status == 200

    async def metrics(self) -> str | None:
        response = await self._get(self._metrics_url)
        return response.content.decode() if response and response.status == 200 else None

    async def _get(self, url: str) -> httpcore.Response | None:
        times = {"connect": CONNECT_TIMEOUT, "read": READ_TIMEOUT, "pool": READ_TIMEOUT}
        with suppress(*UNREACHABLE):
            return await self._pool.request(
                "GET", url, headers=[*self._headers.items()], extensions={"timeout": times}
            )
        return None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        path, method = scope["raw_path"].decode("latin-1"), request.method
        known = [name for name, paths in ROUTES.items() if paths.fullmatch(path)]
        if method not in known:
            return await _no_route(path, known)(scope, receive, send)
        content = await request.body()
        headers = _to_pass_on(request) | self._headers | self._caller(scope)
        if method == "POST":
            try:
                body = await read_off_the_loop(len(content), self._body, request, path, content)
            except RequestError as error:
                return await JSONResponse({"error": str(error)}, 400)(scope, receive, send)
            content = body.content
            if JSON_SIZE in request.headers:
                headers[JSON_SIZE] = str(body.json_size)
        headers["content-length"] = str(len(content))
        begun = False
        try:
            async with self._pool.stream(
                method,
                self._url + path,
                headers=[*headers.items()],
                content=content,
                extensions={"timeout": {"connect": CONNECT_TIMEOUT}},
            ) as answer:
                begun = True
                await _pass_back(answer, send)
        except UNREACHABLE:
            if begun:  # an answer that has begun ends with its connection
                raise
            response = JSONResponse({"error": "The server does not answer. Try again later."}, 503)
            await response(scope, receive, send)

    def _body(self, request: Request, path: str, content: bytes) -> Body:
        json_size = json_size_of(request.headers.get(JSON_SIZE), content)
        if path.endswith("/infer"):
            return infer_body(content, json_size)
        return generate_body(content, self._caller(request.scope))

    def _caller(self, scope: Scope) -> dict[str, str]:
        """Return the client's parameters, which Triton 2.51 reads from headers for `infer` only."""
        host = scope["client"][0] if scope["client"] else ""
        return {HEADER: current.get(), **client_parameters(host, self._client_key)}


def _no_route(path: str, methods: list[str]) -> JSONResponse:
    if methods:
        return JSONResponse({"error": "Method Not Allowed"}, 405, {"Allow": ", ".join(methods)})
    other = OTHER_MODEL.fullmatch(path)
    if other is None:
        return JSONResponse({"error": "Not Found"}, 404)
    message = f"There is no {other[1]!r} among the models here: dflash and dflash_infer."
    return JSONResponse({"error": message}, 404)


def _to_pass_on(request: Request) -> dict[str, str]:
    """Return headers for Triton, without those that HTTP could not carry on."""
    headers = {name: request.headers.get(name, "") for name in PASSED_ON}
    return {
        name: value
        for name, value in headers.items()
        if value and value.isascii() and len(value) <= MAX_HEADER
    }


async def _pass_back(answer: httpcore.Response, send: Send) -> None:
    status, whole = answer.status, b""
    headers = [(n.lower(), value) for n, value in answer.headers if n.lower() in PASSED_BACK]
    if status >= 400:
        whole = await answer.aread()
        message = whole.decode(errors="replace")
        later = refusal_status(message)  # Triton answers some of these with 400
        if later is not None:
            status = later
            headers.append((b"retry-after", str(retry_after(message)).encode()))
        elif status == 500 and whole.startswith(UNPARSED):
            status = 400  # the request is wrong, not Triton
    await send({"type": "http.response.start", "status": status, "headers": headers})
    if whole:
        return await send({"type": "http.response.body", "body": whole})
    async for chunk in answer.aiter_stream():
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b""})

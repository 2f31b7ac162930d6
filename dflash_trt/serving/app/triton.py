"""Proxy to Triton's HTTP on loopback: public models, health, metadata and metrics.

A body is forwarded unchanged in one piece, after a check for what crashes Triton 2.51: deep
nesting, and shapes with more elements than the body can hold.
"""

import json
import math
import re
from contextlib import suppress
from typing import Any

import httpcore
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from dflash_trt.errors import RequestError
from dflash_trt.request_schema import check_json, tensors
from dflash_trt.serving.internal import client_parameters
from dflash_trt.serving.ports import LOOPBACK, Ports
from dflash_trt.serving.security import Security
from dflash_trt.serving.tracing import CONTEXT, HEADER, current

MODEL = r"/v2/models/(?:dflash|dflash_infer)(?:/versions/[0-9]{1,9})?"
ROUTES = {
    "GET": re.compile(rf"/v2/?|/v2/health/(?:live|ready)|{MODEL}(?:/(?:ready|config|stats))?"),
    "POST": re.compile(rf"{MODEL}/(infer|generate|generate_stream)"),
}
JSON_SIZE = "inference-header-content-length"
PASSED_ON = ("content-type", JSON_SIZE, *CONTEXT)
PASSED_BACK = (b"content-type", b"content-length", JSON_SIZE.encode())
TIMEOUTS = {"timeout": {"connect": 5.0}}  # seconds
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
        with suppress(*UNREACHABLE):
            return await self._pool.request("GET", url, headers=[*self._headers.items()])
        return None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        path, method = scope["raw_path"].decode("latin-1"), request.method
        known = [name for name, paths in ROUTES.items() if paths.fullmatch(path)]
        if method not in known:
            status = 405 if known else 404
            headers = {"Allow": ", ".join(known)} if known else None
            return await JSONResponse({"error": "Not Found"}, status, headers)(scope, receive, send)
        body = await request.body()
        size = len(body)
        try:
            if method == "POST":
                body = self._body_to_forward(request, path, body)
        except RequestError as error:
            return await JSONResponse({"error": str(error)}, 400)(scope, receive, send)
        sent = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
        if JSON_SIZE in sent and len(body) != size:
            sent[JSON_SIZE] = str(int(sent[JSON_SIZE]) + len(body) - size)
        sent |= {**self._headers, **self._caller(scope), "content-length": str(len(body))}
        begun = False
        try:
            async with self._pool.stream(
                method, self._url + path, headers=[*sent.items()], content=body, extensions=TIMEOUTS
            ) as answer:
                begun = True
                await _pass_back(answer, send)
        except UNREACHABLE:
            if begun:  # an answer that has begun ends with its connection
                raise
            response = JSONResponse({"error": "The server does not answer. Try again later."}, 503)
            await response(scope, receive, send)

    def _caller(self, scope: Scope) -> dict[str, str]:
        """Return the client's parameters, which Triton 2.51 reads from headers for `infer` only."""
        host = scope["client"][0] if scope["client"] else ""
        return {HEADER: current.get(), **client_parameters(host, self._client_key)}

    def _body_to_forward(self, request: Request, path: str, body: bytes) -> bytes:
        given = request.headers.get(JSON_SIZE) or str(len(body))
        size = int(given) if re.fullmatch("[0-9]{1,9}", given) else len(body) + 1
        if size > len(body):
            raise RequestError(
                "Inference-Header-Content-Length is not the size of the JSON in the body",
                "Give its number of bytes",
            )
        document = parse_checked(body[:size], len(body))
        if path.endswith("/infer"):
            return _with_flat_inputs(document, body, size)
        for name in document.keys() & tensors().keys():
            check_json(name, document[name])
        added: dict[str, Any] = {**self._caller(request.scope)}
        if type(end := document.get("end_id")) is int and "stop_token_ids" not in document:
            added["stop_token_ids"] = end  # as in tensorrtllm_backend
        begin = json.dumps(added).encode()[:-1]
        return begin + (b"," if document else b"") + body.lstrip()[1:]


def _with_flat_inputs(document: dict[str, Any], body: bytes, size: int) -> bytes:
    """Flatten inputs of `[1, n]`, which clients of tensorrtllm_backend send, to `[n]`.

    document: the first `size` bytes of the body. Over gRPC Triton refuses such shapes.
    """
    inputs, changed = document.get("inputs"), False
    for each in inputs if isinstance(inputs, list) else []:
        shape = each.get("shape") if isinstance(each, dict) else None
        while shape and len(shape) > 1 and shape[0] == 1:
            del shape[0]
            changed = True
    return json.dumps(document).encode() + body[size:] if changed else body


async def _pass_back(answer: httpcore.Response, send: Send) -> None:
    status, whole = answer.status, b""
    if status == 500:
        whole = await answer.aread()
        status = 400 if whole.startswith(UNPARSED) else 500  # the request is wrong, not Triton
    headers = [(n.lower(), value) for n, value in answer.headers if n.lower() in PASSED_BACK]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    if whole:
        return await send({"type": "http.response.body", "body": whole})
    async for chunk in answer.aiter_stream():
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def parse_checked(text: bytes, most: int) -> dict[str, Any]:
    """Return the JSON object; RequestError if invalid, or a shape exceeds `most` elements.

    Triton 2.51 allocates a shape before it looks at the data.
    """

    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        for name, value in found:
            if name == "shape" and not _fits(value, most):
                raise RequestError(
                    f"the shape {str(value)[:40]} is not what its data hold", "Correct it"
                )
        return dict(found)

    try:
        document = json.loads(text.decode(), object_pairs_hook=pairs)
    except RecursionError:
        raise RequestError("the body is nested too deeply", "Send a flatter one") from None
    except ValueError as error:  # no UTF-8 or no JSON
        raise RequestError("the body is not JSON", f"Correct it: {error}") from None
    if not isinstance(document, dict):
        raise RequestError("the body is not a JSON object", "Send one")
    return document


def _fits(shape: Any, most: int) -> bool:
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        return False
    return len(shape) <= 8 and math.prod(shape) <= most

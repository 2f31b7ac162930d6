"""A bound on the size of request bodies, chunked ones too."""

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dflash_trt.serving.openai.failures import Failure


class BodyLimit:
    """ASGI middleware: a body of more than `limit` bytes is answered with 413, not read on."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        too_large = f"The body has more than {self._limit} bytes."
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if int(declared) > self._limit:  # the HTTP parser has seen that it is a number
            return await Failure(413, too_large).response()(scope, receive, send)
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._limit:
                raise HTTPException(413, too_large)  # FastAPI lets it through
            return message

        await self._app(scope, counted, send)

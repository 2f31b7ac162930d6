"""Errors in OpenAI's format, with the status codes of its API."""

import logging
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from dflash_trt.errors import DeadlineError, DflashError, RequestError, UnavailableError

log = logging.getLogger(__name__)


@dataclass(eq=False)  # hashable, as exceptions are
class Failure(Exception):
    """What a client is told."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None

    def body(self) -> dict[str, Any]:
        kind = {401: "authentication_error", 429: "rate_limit_error", 504: "timeout_error"}.get(
            self.status, "server_error" if self.status >= 500 else "invalid_request_error"
        )
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        headers = {"Retry-After": "1"} if self.status == 503 else {}
        return JSONResponse(self.body(), self.status, headers)


def to_failure(error: Exception) -> Failure:
    """Only a refused request is told why: other messages name the inside of the server."""
    if isinstance(error, Failure):
        return error
    if isinstance(error, RequestError):
        return Failure(400, str(error))
    if isinstance(error, DeadlineError):
        return Failure(504, "The request took longer than its timeout.", "timeout")
    log.warning("a request failed: %s", error)
    if isinstance(error, UnavailableError):
        return Failure(
            503, "The server cannot take the request now: it is full, starting or stopping."
        )
    return Failure(500, "The server failed. Its log says why.")


def install(app: FastAPI) -> None:
    """Makes every error of `app` one of OpenAI's."""

    async def failed(_: Request, error: Exception) -> JSONResponse:
        return to_failure(error).response()

    async def not_valid(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return _first(error).response()

    async def http(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return Failure(error.status_code, str(error.detail)).response()

    for kind in (Failure, DflashError, Exception):
        app.add_exception_handler(kind, failed)
    app.add_exception_handler(RequestValidationError, not_valid)
    app.add_exception_handler(HTTPException, http)


def _first(error: RequestValidationError) -> Failure:
    """The first of the faults; its place without the parts that name no field."""
    fault = error.errors()[0]
    place = [str(part) for part in fault["loc"][1:]]
    if fault["type"] == "json_invalid" or not place:
        return Failure(400, f"The body is not the JSON object of a request: {fault['msg']}.")
    message = str(fault["msg"]).removeprefix("Value error, ")
    return Failure(400, f"{'.'.join(place)}: {message}", place[0])

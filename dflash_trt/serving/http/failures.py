"""Errors in OpenAI's format, with the status codes of its API."""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from dflash_trt.errors import DeadlineError, DflashError, RequestError, UnavailableError
from dflash_trt.request_schema import first_fault
from dflash_trt.serving.refusals import OVER_LIMIT, UNAVAILABLE, refusal_status, retry_after

log = logging.getLogger(__name__)
# part of every refusal of too long a request, in OpenAI's words, which LiteLLM looks for
TOO_LONG = re.compile(
    r"This model's maximum context length is (?P<room>\d+) tokens: the prompt's (?P<prompt>\d+)"
    r"(?P<requested> and the \d+ asked for)?"
)


@dataclass(eq=False)  # hashable, as exceptions are
class Failure(Exception):
    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: int = 1  # seconds, if it is a matter of time

    def body(self) -> dict[str, Any]:
        kind = {401: "authentication_error", 429: "rate_limit_error", 504: "timeout_error"}.get(
            self.status, "server_error" if self.status >= 500 else "invalid_request_error"
        )
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        later = self.status in (OVER_LIMIT, UNAVAILABLE)
        headers = {"Retry-After": str(self.retry_after)} if later else {}
        return JSONResponse(self.body(), self.status, headers)


def to_failure(error: Exception) -> Failure:
    """Convert an error; only refusals keep their message, others could reveal internals."""
    if isinstance(error, Failure):
        return error
    if isinstance(error, RequestError):
        return Failure(400, str(error))
    if isinstance(error, DeadlineError):
        return Failure(504, "The request took longer than its timeout.", "timeout")
    status = refusal_status(str(error)) if isinstance(error, UnavailableError) else None
    if status == OVER_LIMIT:
        return Failure(status, str(error), retry_after=retry_after(str(error)))
    log.warning("a request failed: %s", error)
    if isinstance(error, UnavailableError):
        return Failure(
            UNAVAILABLE,
            "The server cannot take the request now: it is full, starting or stopping.",
            retry_after=retry_after(str(error)),
        )
    return Failure(500, "The server failed. Its log says why.")


def translate_refusal(error: RequestError, names: Mapping[str, str], prompt_field: str) -> Failure:
    words = re.split("([a-z_]+)", str(error))
    message = "".join(names.get(word, word) for word in words)
    too_long = TOO_LONG.search(str(error))
    if too_long is None:
        param = next((names[word] for word in words if word in names), prompt_field)
        return Failure(400, message, param)
    param = prompt_field
    if too_long["requested"] and int(too_long["prompt"]) < int(too_long["room"]):
        param = names.get("max_tokens", prompt_field)
    return Failure(400, message, param, "context_length_exceeded")


def install_error_handlers(app: FastAPI) -> None:
    async def failed(_: Request, error: Exception) -> JSONResponse:
        return to_failure(error).response()

    async def http(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        response = Failure(error.status_code, str(error.detail)).response()
        response.headers.update(error.headers or {})  # of 405: the allowed methods
        return response

    for kind in (Failure, DflashError, Exception):
        app.add_exception_handler(kind, failed)
    app.add_exception_handler(HTTPException, http)


def first_fault_of(error: ValidationError, names: Mapping[str, str] | None = None) -> Failure:
    """Return the refusal of a body; names: the API's own of fields that are called otherwise."""
    fault = error.errors()[0]
    if not fault["loc"]:
        reason = str(fault["msg"]).removeprefix("Value error, ")
        return Failure(400, f"The body is not the JSON object of a request: {reason}.")
    name = str(fault["loc"][0])
    here = (names or {}).get(name, name)
    path, problem = first_fault([fault])
    path = path.replace(name, here, 1)
    param = here[:40]
    if fault["type"] == "missing":
        message = f"Missing required parameter: '{path}'."
        return Failure(400, message, param, "missing_required_parameter")
    if fault["type"] == "extra_forbidden":
        return Failure(400, f"Unknown parameter: '{path[:40]}'.", param, "unknown_parameter")
    return Failure(400, f"'{path}' {problem}.", param)

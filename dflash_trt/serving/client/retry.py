"""One request through answers, failures and retries, the same for both clients."""

import random
import time
from collections.abc import Mapping
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from dflash_trt.build.settings import CODED_ERRORS
from dflash_trt.errors import (
    DeadlineError,
    DflashError,
    RequestError,
    ServerError,
    UnavailableError,
)
from dflash_trt.prompts import AnyPrompt
from dflash_trt.serving.client.fields import MODEL, to_request
from dflash_trt.serving.client.results import Chunk, to_chunks
from dflash_trt.serving.tracing import sampled

TIMEOUT = 600.0  # seconds, when a request does not say
MAX_TIMEOUT = 1e9  # seconds; Triton counts microseconds
CODES = ("INVALID_ARG", "UNAVAILABLE", "INTERNAL", "CANCELLED")  # of the model's errors
# what Triton says of a model whose process died, and while it is loaded again
RESTARTING = ("is not healthy", "has no available versions", "is not at ready state")
GRACE = 2.0  # seconds that the server has, after the deadline, to say that it was met
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0  # seconds


class Attempts:
    """The attempts of a request: what the loops of the clients ask between two gRPC calls."""

    def __init__(
        self,
        address: str,
        prompt: AnyPrompt,
        options: Mapping[str, Any],
        *,
        stream: bool,
        retries: int,
    ) -> None:
        fields = dict(options)
        timeout, parameters = fields.pop("timeout", None), fields.pop("parameters", None)
        self._timeout = TIMEOUT if timeout is None else float(timeout)
        if not 0 < self._timeout < MAX_TIMEOUT:
            raise RequestError(f"timeout is {timeout}", "Give seconds, more than 0")
        self._request = to_request(prompt, fields, stream=stream)
        self._request.parameters[CODED_ERRORS].bool_param = True
        for name, value in (parameters or {}).items():
            self._request.parameters[name].string_param = value
        self.metadata = [*sampled(parameters or {}).items()]  # Triton's own trace goes by it
        self._address = address
        self._open = fields.get("n") or 1  # choices that have not ended
        self._retries = retries
        self._failures = 0
        self._begun = False
        self._start = time.monotonic()

    def next(self) -> tuple[service_pb2.ModelInferRequest, float]:
        """The request, with the time that is left of its deadline, and the call's own timeout."""
        left = self._left()
        self._request.parameters["timeout"].int64_param = max(1, round(left * 1e6))
        return self._request, left + GRACE

    def read(self, response: service_pb2.ModelStreamInferResponse) -> list[Chunk]:
        """The chunks of a response; raises what an error in it means."""
        if response.error_message:
            code, message = _split(response.error_message)
            raise explain(code, message, self._address)
        self._begun = True
        chunks = to_chunks(response.infer_response, self._start)
        self._open -= sum(chunk.final is not None for chunk in chunks)
        return chunks

    def end(self) -> None:
        """Raises ServerError when the stream is over before every choice is."""
        if self._open > 0:
            raise ServerError(
                f"the server at {self._address} ended the answer before its end", "Look at its log"
            )

    def failed(self, error: grpc.RpcError | DflashError) -> float:
        """Seconds to wait before the next attempt; raises what the error means when there is none.

        Retried is only what the server did not begin: UNAVAILABLE before the first response. The
        pauses grow exponentially, with full jitter, so that clients do not come back together.
        """
        if isinstance(error, DflashError):
            problem = error
        else:
            problem = explain(error.code().name, error.details() or "", self._address)
        pause = random.uniform(0, min(LONGEST_PAUSE, FIRST_PAUSE * 2**self._failures))
        self._failures += 1
        retry = isinstance(problem, UnavailableError) and not self._begun
        if not retry or self._failures > self._retries or pause >= self._left():
            raise problem from None
        return pause

    def _left(self) -> float:
        return self._start + self._timeout - time.monotonic()


def _split(message: str) -> tuple[str, str]:
    """The code and the message of an error in a stream; Triton's own errors have no code.

    A gRPC status would be the way, but a client that asks for it (`triton_grpc_error`) brings
    Triton 2.51 down: a segmentation fault about every 500 errors.
    """
    code, colon, rest = message.partition(": ")
    return (code, rest) if colon and code in CODES else ("INTERNAL", message)


def explain(code: str, message: str, address: str) -> DflashError:
    """What an error means to a user; `code` is Triton's or gRPC's name of it."""
    problem, _, fix = message.partition(". ")  # as DflashError writes them
    if code in ("INVALID_ARG", "INVALID_ARGUMENT"):
        return RequestError(problem, fix)
    if code == "DEADLINE_EXCEEDED":
        return DeadlineError(
            f"the server at {address} did not answer in time", "Give a longer timeout"
        )
    if any(words in message for words in RESTARTING):
        return UnavailableError(f"a model of the server at {address} is down", "Try again later")
    if "unknown model" in message:
        return ServerError(
            f"the server at {address} does not serve the model {MODEL!r}",
            "Give it a directory that `dflash-trt build` made: dflash-trt serve DIR",
        )
    if code == "UNAVAILABLE":
        if "restricted" in message:
            return ServerError(
                f"the server at {address} refused the request: {message}",
                "Give the client that header and its key",
            )
        if fix:
            return UnavailableError(problem, fix)
        reason = message.splitlines()[0] if message else "no reason given"
        return UnavailableError(
            f"there is no server at {address} ({reason})",
            "Start one with `dflash-trt serve DIR`, or give the address of its gRPC port",
        )
    return ServerError(f"the server at {address} failed: {problem}", fix or "Look at its log")

"""One request's way through answers, failures and retries, the same for both clients."""

import random
import time
from collections.abc import Mapping
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from dflash_trt.errors import (
    DeadlineError,
    DflashError,
    RequestError,
    ServerError,
    UnavailableError,
)
from dflash_trt.serving.client.fields import MODEL, Prompt, to_request
from dflash_trt.serving.client.results import Chunk, to_chunks

TIMEOUT = 600.0  # seconds, when a request does not say
GRACE = 2.0  # seconds that the server has, after the deadline, to say that it was met
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0  # seconds


class Exchange:
    """What the loops of the clients ask between two gRPC calls."""

    def __init__(
        self,
        address: str,
        prompt: Prompt,
        options: Mapping[str, Any],
        *,
        stream: bool,
        retries: int,
    ) -> None:
        fields = dict(options)
        self._timeout = float(fields.pop("timeout", None) or TIMEOUT)
        self._request = to_request(prompt, fields, stream=stream)
        self._address = address
        self._open = fields.get("n") or 1  # choices that have not ended
        self._retries = retries
        self._failures = 0
        self._begun = False
        self._start = time.monotonic()

    def attempt(self) -> tuple[service_pb2.ModelInferRequest, float]:
        """The request, with the time that is left of its deadline, and the call's own timeout."""
        left = self._left()
        self._request.parameters["timeout"].int64_param = max(1, round(left * 1e6))
        return self._request, left + GRACE

    def read(self, response: service_pb2.ModelStreamInferResponse) -> list[Chunk]:
        """The chunks of a response."""
        if response.error_message:
            raise explain(grpc.StatusCode.INTERNAL, response.error_message, self._address)
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

    def failed(self, error: grpc.RpcError) -> float:
        """Seconds to wait before the next attempt; raises what the error means when there is none.

        Retried is only what the server did not begin: UNAVAILABLE before the first response. The
        pauses grow exponentially, with full jitter, so that clients do not come back together.
        """
        problem = explain(error.code(), error.details() or "", self._address)
        pause = random.uniform(0, min(LONGEST_PAUSE, FIRST_PAUSE * 2**self._failures))
        self._failures += 1
        retry = isinstance(problem, UnavailableError) and not self._begun
        if not retry or self._failures > self._retries or pause >= self._left():
            raise problem from error
        return pause

    def _left(self) -> float:
        return self._start + self._timeout - time.monotonic()


def explain(code: grpc.StatusCode, message: str, address: str) -> DflashError:
    """What a gRPC status means to a user."""
    problem, _, fix = message.partition(". ")  # as DflashError writes them
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return RequestError(problem, fix)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineError(
            f"the server at {address} did not answer in time", "Give a longer timeout"
        )
    if "unknown model" in message:
        return ServerError(
            f"the server at {address} does not serve the model {MODEL!r}",
            "Give it a directory that `dflash-trt build` made: dflash-trt serve DIR",
        )
    if code is grpc.StatusCode.UNAVAILABLE:
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

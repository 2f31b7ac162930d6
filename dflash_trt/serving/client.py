"""Call the public model over gRPC and get its text as it comes."""

import queue
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

from dflash_trt.errors import DflashError, RequestError, ServerError

MODEL = "dflash"
SILENCE = 120.0  # seconds without any news after which the server is given up


@dataclass
class Summary:
    """The totals of a request, in its last chunk."""

    finish_reason: str  # "stop" or "length"
    prompt_tokens: int
    completion_tokens: int
    rounds: int
    drafted: int  # draft tokens proposed
    accepted: int  # draft tokens accepted
    acceptance_length: float  # tau: tokens committed per round
    seconds: float  # from sending the request to the last chunk


@dataclass
class Chunk:
    """A piece of the answer; `final` is set in the last one."""

    text: str
    token_ids: list[int]
    round_tokens: list[int]  # tokens that each round committed; the first token is prefill's
    final: Summary | None


def stream(url: str, prompt: str, *, max_tokens: int, temperature: float) -> Iterator[Chunk]:
    """Streams the continuation of `prompt` from the server at `url` (HOST:PORT, gRPC).

    Raises `RequestError` when the server refuses the request, `ServerError` when it cannot be
    reached, does not have the model or fails. Closing the iterator cancels the request.
    """
    results: queue.Queue[tuple[Any, Any]] = queue.Queue()
    inputs = [
        _input("text_input", "BYTES", np.array([prompt.encode()], dtype=object)),
        _input("max_tokens", "INT32", np.array([max_tokens], dtype=np.int32)),
        _input("temperature", "FP32", np.array([temperature], dtype=np.float32)),
        _input("stream", "BOOL", np.array([True])),
    ]
    start = time.monotonic()
    address = url.removeprefix("grpc://")
    client = InferenceServerClient(address)
    try:
        client.start_stream(
            lambda result, error: results.put((result, error)),
            headers={"triton_grpc_error": "true"},  # errors with their status code
        )
        with suppress(InferenceServerException):  # a stream that failed tells the callback why
            client.async_stream_infer(MODEL, inputs)
        final = None
        while final is None:
            result, error = results.get(timeout=SILENCE)
            if error is not None:
                raise _explain(error, address)
            final = _summary(result, time.monotonic() - start)
            text = result.as_numpy("text_output").item().decode()
            ids, rounds = (result.as_numpy(n).tolist() for n in ("token_ids", "round_tokens"))
            yield Chunk(text, ids, rounds, final)
    except queue.Empty:
        raise ServerError(
            f"the server at {address} said nothing for {SILENCE:.0f} s", "Look at its log"
        ) from None
    except InferenceServerException as error:
        raise _explain(error, address) from error
    finally:
        with suppress(InferenceServerException):
            client.stop_stream(cancel_requests=True)
        client.close()


def _input(name: str, datatype: str, array: "np.ndarray[Any, Any]") -> InferInput:
    tensor = InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array)
    return tensor


def _summary(result: Any, seconds: float) -> Summary | None:
    reason = result.as_numpy("finish_reason").item().decode()
    if not reason:
        return None
    names = ("prompt_tokens", "completion_tokens", "rounds", "drafted", "accepted")
    totals = {name: int(result.as_numpy(name).item()) for name in names}
    tau = float(result.as_numpy("acceptance_length").item())
    return Summary(reason, **totals, acceptance_length=tau, seconds=seconds)


def _explain(error: InferenceServerException, address: str) -> DflashError:
    status, message = str(error.status()).removeprefix("StatusCode."), str(error.message())
    problem, _, fix = message.partition(". ")  # as DflashError writes them
    if status == "INVALID_ARGUMENT":
        return RequestError(problem, fix)
    if "unknown model" in message:
        return ServerError(
            f"the server at {address} does not serve the model {MODEL!r}",
            "Give it a directory that `dflash-trt build` made: dflash-trt serve DIR",
        )
    if status == "UNAVAILABLE" and not fix:
        return ServerError(
            f"there is no server at {address} ({message.splitlines()[0]})",
            "Start one with `dflash-trt serve DIR`, or give the address of its gRPC port",
        )
    return ServerError(f"the server at {address} failed: {problem}", fix or "Look at its log")

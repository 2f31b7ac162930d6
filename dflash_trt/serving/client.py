"""gRPC clients of the public model: `Client`, `AsyncClient`, or `stream` for one request.

For `generate`, the application and tests; other programs use `tritonclient` or `openai`
(docs/serving.md).
"""

import ipaddress
import time
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import deserialize_bytes_tensor, triton_to_np_dtype

from dflash_trt.errors import (
    DeadlineError,
    DflashError,
    RequestError,
    ServerError,
    UnavailableError,
)
from dflash_trt.prompts import AnyPrompt
from dflash_trt.request_schema import encode
from dflash_trt.serving.answer import Array, Chunk, from_arrays, join_all
from dflash_trt.wire import CODED_ERRORS

MODEL = "dflash"
TIMEOUT = 600.0  # seconds, by default
MAX_TIMEOUT = 1e9  # seconds; Triton counts microseconds
GRACE = 2.0  # seconds after the deadline for the server to report it
CODES = ("INVALID_ARG", "UNAVAILABLE", "INTERNAL", "CANCELLED")  # of the model's errors
# Triton's words for a model whose process died or is being reloaded
RESTARTING = ("is not healthy", "has no available versions", "is not at ready state")
CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # otherwise a failed channel fails from memory for a second or longer
    ("grpc.initial_reconnect_backoff_ms", 100),
    # gRPC's name for the connection timeout: 100 ms were too few on a busy machine
    ("grpc.min_reconnect_backoff_ms", 10_000),
]
# gRPC takes a proxy of the environment for 127.0.0.1, too, which cannot lead there
NO_PROXY = ("grpc.enable_http_proxy", 0)


@dataclass(frozen=True)
class Tls:
    """A PEM file to trust, None: the system's; server_name: the certificate's, None: the host."""

    root_certificate: Path | str | None = None
    server_name: str | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        file = self.root_certificate
        try:
            return grpc.ssl_channel_credentials(file and Path(file).read_bytes())
        except OSError as error:
            raise ServerError(
                f"cannot read {file}: {error.strerror}", "Give a readable PEM file"
            ) from error


@dataclass
class Completion:
    choices: list[Chunk]  # by index, whole

    @property
    def text(self) -> str:
        return self.choices[0].text


class _Call:
    def __init__(self, address: str, prompt: AnyPrompt, stream: bool, options: Mapping[str, Any]):
        """Encode a request.

        options: `GenerateRequest`'s, which the model validates, `timeout` (s) and `parameters`.
        Raises RequestError for what no tensor can hold.
        """
        values = {name: value for name, value in options.items() if value is not None}
        self.timeout = float(values.pop("timeout", TIMEOUT))
        if not 0 < self.timeout < MAX_TIMEOUT:
            raise RequestError(f"timeout is {self.timeout}", "Give seconds, more than 0")
        parameters = values.pop("parameters", {})
        if isinstance(prompt, str):
            values["text_input"] = prompt
        else:
            name = "input_ids" if prompt and isinstance(prompt[0], int) else "messages"
            values[name] = list(prompt)
        values["stream"] = stream
        values = {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}
        self.request = service_pb2.ModelInferRequest(model_name=MODEL)
        for name, value in values.items():
            try:
                datatype, shape, content = encode(name, value)
            except (OverflowError, TypeError, ValueError) as error:
                raise RequestError(f"{name} is not acceptable: {error}", "Correct it") from error
            self.request.inputs.add(name=name, datatype=datatype, shape=shape)
            self.request.raw_input_contents.append(content)
        self.request.parameters[CODED_ERRORS].bool_param = True
        self.request.parameters["timeout"].int64_param = max(1, round(self.timeout * 1e6))
        for name, value in parameters.items():
            self.request.parameters[name].string_param = value
        self._address = address
        self._open = values.get("n", 1)  # choices that have not ended
        self._start = time.monotonic()

    def read(self, response: service_pb2.ModelStreamInferResponse) -> list[Chunk]:
        """Return the chunks of a response; raise the error in it."""
        if response.error_message:
            raise explain(*split_error(response.error_message), self._address)
        arrays = read_tensors(response.infer_response)
        chunks = from_arrays(arrays, time.monotonic() - self._start)
        self._open -= sum(chunk.finish_reason != "" for chunk in chunks)
        return chunks

    def check_complete(self) -> None:
        if self._open > 0:
            raise ServerError(
                f"the server at {self._address} ended the answer before its end", "Look at its log"
            )

    def explain(self, error: grpc.RpcError) -> DflashError:
        return explain(error.code().name, error.details() or "", self._address)


class _Connection:
    _grpc: Any

    def __init__(
        self, url: str, *, tls: Tls | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        self._address = url  # HOST:PORT
        self._metadata = [(name.lower(), value) for name, value in (headers or {}).items()]
        self._channel = open_channel(self._grpc, self._address, tls)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def _call(self, call: _Call) -> Any:
        request, timeout = iter([call.request]), call.timeout + GRACE
        return self._stub.ModelStreamInfer(request, metadata=self._metadata, timeout=timeout)


class Client(_Connection):
    """A connection to a server. Thread-safe.

    Both calls raise RequestError if the server refuses the request, UnavailableError if it is
    unreachable or takes no requests now, DeadlineError after `timeout`, ServerError if it fails.
    """

    _grpc = grpc

    def generate(self, prompt: AnyPrompt, **options: Any) -> Completion:
        """Return the whole answer; its finish_reason is "cancelled" after a timeout."""
        return Completion(join_all(self._chunks(prompt, False, options)))

    def stream(self, prompt: AnyPrompt, **options: Any) -> Generator[Chunk, None, None]:
        """Yield the answer as it comes; closing the iterator cancels the request."""
        return self._chunks(prompt, True, options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def _chunks(
        self, prompt: AnyPrompt, stream: bool, options: Mapping[str, Any]
    ) -> Generator[Chunk, None, None]:
        call = _Call(self._address, prompt, stream, options)
        responses = self._call(call)
        try:
            for response in responses:
                yield from call.read(response)
            call.check_complete()
        except grpc.RpcError as error:
            raise call.explain(error) from None
        finally:
            responses.cancel()


class AsyncClient(_Connection):
    """The asyncio counterpart of `Client`. Create it inside its event loop."""

    _grpc = grpc.aio

    async def generate(self, prompt: AnyPrompt, **options: Any) -> Completion:
        """Return the whole answer; cancelling the task cancels the request."""
        return Completion(join_all([chunk async for chunk in self._chunks(prompt, False, options)]))

    def stream(self, prompt: AnyPrompt, **options: Any) -> AsyncGenerator[Chunk, None]:
        """Yield the answer; closing the iterator, or cancelling its task, cancels the request."""
        return self._chunks(prompt, True, options)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def _chunks(
        self, prompt: AnyPrompt, stream: bool, options: Mapping[str, Any]
    ) -> AsyncGenerator[Chunk, None]:
        call = _Call(self._address, prompt, stream, options)
        responses = self._call(call)
        try:
            async for response in responses:
                for chunk in call.read(response):
                    yield chunk
            call.check_complete()
        except grpc.RpcError as error:
            raise call.explain(error) from None
        finally:
            responses.cancel()


def stream(url: str, prompt: AnyPrompt, **options: Any) -> Generator[Chunk, None, None]:
    """Yield from `Client.stream` over a new connection."""
    with Client(url) as client:
        yield from client.stream(prompt, **options)


def open_channel(grpc_or_aio: Any, address: str, tls: Tls | None) -> Any:
    options: list[tuple[str, Any]] = list(CHANNEL_OPTIONS)
    if is_this_machine(address):
        options.append(NO_PROXY)
    if tls is None:
        return grpc_or_aio.insecure_channel(address, options)
    if tls.server_name:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return grpc_or_aio.secure_channel(address, tls.credentials(), options)


def is_this_machine(address: str) -> bool:
    """Return whether HOST:PORT is on loopback, where no proxy of the environment leads."""
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def read_tensors(response: service_pb2.ModelInferResponse) -> dict[str, Array]:
    return {
        output.name: read_tensor(output, content)
        for output, content in zip(response.outputs, response.raw_output_contents, strict=True)
    }


def read_tensor(output: Any, content: bytes) -> Array:
    array: Array
    if output.datatype == "BYTES":
        array = deserialize_bytes_tensor(content)
    else:
        array = np.frombuffer(content, triton_to_np_dtype(output.datatype))
    return array.reshape(tuple(output.shape))


def split_error(message: str) -> tuple[str, str]:
    """Return the code and message of a stream's error; Triton's own have no code.

    A gRPC status would be better, but a client that requests it (`triton_grpc_error`) makes Triton
    2.51 crash about every 500 errors.
    """
    code, colon, rest = message.partition(": ")
    return (code, rest) if colon and code in CODES else ("INTERNAL", message)


def explain(code: str, message: str, address: str) -> DflashError:
    """Return the exception for an error; `code` is Triton's or gRPC's name of it."""
    problem, _, fix = message.partition(". ")  # as DflashError writes them
    if code in ("INVALID_ARG", "INVALID_ARGUMENT"):
        return RequestError(problem, fix)
    if code == "DEADLINE_EXCEEDED":
        return DeadlineError(
            f"the server at {address} did not answer in time", "Give a longer timeout"
        )
    if any(words in message for words in RESTARTING):
        return UnavailableError(f"a model of the server at {address} is down", "Try again later")
    if code == "UNAVAILABLE" and fix:
        return UnavailableError(problem, fix)
    if code == "UNAVAILABLE":
        reason = message.splitlines()[0] if message else "no reason given"
        return UnavailableError(
            f"no server answers at {address} ({reason})",
            "Start one with `dflash-trt serve DIR`, or give HOST:PORT of its gRPC, its TLS and key",
        )
    return ServerError(f"the server at {address} failed: {problem}", fix or "Look at its log")

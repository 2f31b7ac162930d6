"""The clients: `Client` for threads, `AsyncClient` for asyncio."""

import asyncio
import time
from collections.abc import AsyncGenerator, Generator, Mapping
from typing import Any, ClassVar, Self, Unpack

import grpc
from tritonclient.grpc import service_pb2_grpc

from dflash_trt.errors import ServerError
from dflash_trt.prompts import AnyPrompt
from dflash_trt.request_fields import Options
from dflash_trt.serving.client.connection import Tls, open_channel, to_address
from dflash_trt.serving.client.results import Chunk, Completion, to_completion
from dflash_trt.serving.client.retry import Attempts


class _Connection:
    _grpc: ClassVar[Any]

    def __init__(
        self,
        url: str,
        *,
        tls: Tls | None = None,
        headers: Mapping[str, str] | None = None,
        retries: int = 3,
    ) -> None:
        self._address = to_address(url)
        self._metadata = [(name.lower(), value) for name, value in (headers or {}).items()]
        self._retries = retries
        self._channel = open_channel(self._grpc, self._address, tls)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def _attempts(self, prompt: AnyPrompt, options: Mapping[str, Any], stream: bool) -> Attempts:
        return Attempts(self._address, prompt, options, stream=stream, retries=self._retries)

    def _call(self, attempts: Attempts) -> Any:
        request, timeout = attempts.next()
        metadata = [*self._metadata, *attempts.metadata]
        return self._stub.ModelStreamInfer(iter([request]), metadata=metadata, timeout=timeout)


class Client(_Connection):
    """A connection to a server; any number of threads may use it at the same time.

    url: HOST:PORT of its gRPC port; headers: sent with every request; retries: how often a request
    that the server could not take is tried again.

    Both calls raise RequestError when the server refuses the request, UnavailableError when it
    cannot be reached or takes no requests now, DeadlineError when `timeout` has passed without an
    answer, and ServerError when it fails.
    """

    _grpc = grpc

    def generate(self, prompt: AnyPrompt, **options: Unpack[Options]) -> Completion:
        """The whole answer. One that ran out of time has the finish_reason "cancelled"."""
        return to_completion(self._chunks(prompt, options, stream=False))

    def stream(self, prompt: AnyPrompt, **options: Unpack[Options]) -> Generator[Chunk, None, None]:
        """The answer as it comes; closing the iterator cancels the request."""
        return self._chunks(prompt, options, stream=True)

    def close(self) -> None:
        """Cancels what is still running."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _chunks(
        self, prompt: AnyPrompt, options: Mapping[str, Any], *, stream: bool
    ) -> Generator[Chunk, None, None]:
        attempts = self._attempts(prompt, options, stream)
        while True:
            call = self._call(attempts)
            try:
                for response in call:
                    yield from attempts.read(response)
                return attempts.end()
            except (grpc.RpcError, ServerError) as error:
                pause = attempts.failed(error)
            finally:
                call.cancel()
            time.sleep(pause)


class AsyncClient(_Connection):
    """See `Client`. Make it inside the event loop that uses it."""

    _grpc = grpc.aio

    async def generate(self, prompt: AnyPrompt, **options: Unpack[Options]) -> Completion:
        """The whole answer; cancelling the task cancels the request."""
        return to_completion([chunk async for chunk in self._chunks(prompt, options, stream=False)])

    def stream(self, prompt: AnyPrompt, **options: Unpack[Options]) -> AsyncGenerator[Chunk, None]:
        """The answer as it comes; closing the iterator, or cancelling its task, cancels it."""
        return self._chunks(prompt, options, stream=True)

    async def close(self) -> None:
        """Cancels what is still running."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _chunks(
        self, prompt: AnyPrompt, options: Mapping[str, Any], *, stream: bool
    ) -> AsyncGenerator[Chunk, None]:
        attempts = self._attempts(prompt, options, stream)
        while True:
            call = self._call(attempts)
            try:
                async for response in call:
                    for chunk in attempts.read(response):
                        yield chunk
                attempts.end()
                return
            except (grpc.RpcError, ServerError) as error:
                pause = attempts.failed(error)
            finally:
                call.cancel()
            await asyncio.sleep(pause)

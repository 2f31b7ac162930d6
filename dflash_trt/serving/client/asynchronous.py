"""The client for asyncio: the same calls as `Client`, awaited."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Self

import grpc
from tritonclient.grpc import service_pb2_grpc
from typing_extensions import Unpack

from dflash_trt.errors import ServerError
from dflash_trt.prompts import AnyPrompt
from dflash_trt.serving.client.connection import Tls, open_channel, to_address, to_metadata
from dflash_trt.serving.client.exchange import Exchange
from dflash_trt.serving.client.fields import Options
from dflash_trt.serving.client.results import Chunk, Completion, to_completion


class AsyncClient:
    """See `Client`. Make it inside the event loop that uses it."""

    def __init__(
        self,
        url: str,
        *,
        tls: Tls | None = None,
        headers: Mapping[str, str] | None = None,
        retries: int = 3,
    ) -> None:
        self._address = to_address(url)
        self._metadata = to_metadata(headers)
        self._retries = retries
        self._channel = open_channel(grpc.aio, self._address, tls)
        self._infer = service_pb2_grpc.GRPCInferenceServiceStub(self._channel).ModelStreamInfer

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
        exchange = Exchange(self._address, prompt, options, stream=stream, retries=self._retries)
        while True:
            request, timeout = exchange.attempt()
            call = self._infer(iter([request]), metadata=self._metadata, timeout=timeout)
            try:
                async for response in call:
                    for chunk in exchange.read(response):
                        yield chunk
                exchange.end()
                return
            except (grpc.RpcError, ServerError) as error:
                pause = exchange.failed(error)
            finally:
                call.cancel()
            await asyncio.sleep(pause)

"""The client for threads."""

import time
from collections.abc import Generator, Mapping
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


class Client:
    """A connection to a server; any number of threads may use it at the same time.

    url: HOST:PORT of its gRPC port; headers: sent with every request; retries: how often a request
    that the server could not take is tried again.

    Both calls raise RequestError when the server refuses the request, UnavailableError when it
    cannot be reached or takes no requests now, DeadlineError when `timeout` has passed without an
    answer, and ServerError when it fails.
    """

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
        self._channel = open_channel(grpc, self._address, tls)
        self._infer = service_pb2_grpc.GRPCInferenceServiceStub(self._channel).ModelStreamInfer

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
        exchange = Exchange(self._address, prompt, options, stream=stream, retries=self._retries)
        while True:
            request, timeout = exchange.attempt()
            call = self._infer(iter([request]), metadata=self._metadata, timeout=timeout)
            try:
                for response in call:
                    yield from exchange.read(response)
                return exchange.end()
            except (grpc.RpcError, ServerError) as error:
                pause = exchange.failed(error)
            finally:
                call.cancel()
            time.sleep(pause)

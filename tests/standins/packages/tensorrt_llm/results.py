"""What a request gives back, as it grows."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tensorrt_llm.sampling_params import SamplingParams


@dataclass(slots=True)
class SpeculativeDecoding:
    acceptance_rate: float
    total_accepted_draft_tokens: int
    total_draft_tokens: int


@dataclass(slots=True)
class RequestPerfMetrics:
    speculative_decoding: SpeculativeDecoding


@dataclass(slots=True)
class CompletionOutput:
    index: int
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    request_perf_metrics: RequestPerfMetrics | None = None
    _last_token_ids_len: int = field(default=0, init=False, repr=False)

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def token_ids_diff(self) -> list[int]:
        return self.token_ids[self._last_token_ids_len :]


@dataclass(frozen=True)
class Response:
    """The engine's report on a request: what is new, and its totals."""

    token_ids: list[int]
    iterations: int  # the prompt's included
    average: float  # tokens of an iteration
    finish_reason: str | None = None
    drafted: int = 0
    accepted: int = 0
    error: Exception | None = None
    cached: int = 0  # of the prompt's tokens


class RequestOutput:
    """A result that grows with each response taken, by iterating or `result`."""

    __slots__ = (
        *("_abort", "_done", "_loop", "_params", "_queue", "avg_decoded_tokens_per_iter"),
        *("cached_tokens", "outputs", "prompt_token_ids", "request_id"),
    )

    def __init__(
        self,
        request_id: int,
        prompt_token_ids: list[int],
        params: SamplingParams,
        abort: Callable[[int], None],
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.outputs = [CompletionOutput(0)]
        self.cached_tokens = 0
        self.avg_decoded_tokens_per_iter: float | None = None
        self._params = params
        self._abort = abort
        self._done = False
        try:
            self._loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
            self._queue: Any = asyncio.Queue()
        except RuntimeError:
            self._loop, self._queue = None, queue.Queue()

    @property
    def finished(self) -> bool:
        return self._done

    def abort(self) -> None:
        self._abort(self.request_id)

    def result(self, timeout: float | None = None) -> RequestOutput:
        while not self._done:
            self._handle(self._queue.get(timeout=timeout))
        return self

    def __aiter__(self) -> RequestOutput:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._done:
            raise StopAsyncIteration
        assert self._loop is not None, (
            "The asyncio event loop was not present during initialization"
        )
        self._handle(await self._queue.get())
        return self

    def _put(self, response: Response) -> None:
        if self._loop is None:
            self._queue.put(response)
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._queue.put_nowait, response)

    def _handle(self, response: Response) -> None:
        if response.error is not None:
            self._done = True
            raise response.error
        [output] = self.outputs
        self.cached_tokens = response.cached
        self.avg_decoded_tokens_per_iter = response.average
        output._last_token_ids_len = output.length
        output.token_ids.extend(response.token_ids)
        output.finish_reason = response.finish_reason
        self._done = response.finish_reason is not None
        if self._done and self._params.return_perf_metrics:
            rate = response.accepted / response.drafted if response.drafted else 0.0
            output.request_perf_metrics = RequestPerfMetrics(
                SpeculativeDecoding(rate, response.accepted, response.drafted)
            )

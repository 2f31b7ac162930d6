"""The thread that talks to Triton: sends chunks and checks for cancelled requests.

Sending takes 0.1 to 0.4 ms a response, too long for decoding threads. While the thread is busy,
chunks of one choice are joined.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dflash_trt.serving.answer import Chunk, join
from dflash_trt.serving.model.output_processor import OutputProcessor

log = logging.getLogger(__name__)

POLL = 0.005  # minimum seconds between two checks for cancellation
SHARE = 0.1  # their maximum fraction of time: asking Triton takes 0.04 ms a request
IDLE = 0.5  # seconds


class Reply(Protocol):
    def send(self, chunks: Sequence[Chunk], *, last: bool) -> None: ...
    def fail(self, code: str, message: str) -> None: ...
    def cancelled(self) -> bool: ...


@dataclass(eq=False)
class RequestState:
    reply: Reply
    deadline: float | None  # time.monotonic()
    client: str
    request_id: str
    admitted: int  # sequences: see `RequestHandler`
    streaming: bool = False
    choices: list[OutputProcessor] = field(default_factory=list)
    gone: bool = False  # the client disconnected
    ended: dict[int, Chunk] = field(default_factory=dict)  # last chunk of each choice
    failure: tuple[str, str] | None = None  # code and message

    @property
    def log_fields(self) -> dict[str, str]:
        return {"request_id": self.request_id}


class ResponseSender:
    """Calls `drop` for a cancelled or timed-out request, `closed` once per answered request."""

    def __init__(
        self, drop: Callable[[RequestState], None], closed: Callable[[RequestState], None]
    ) -> None:
        self._drop = drop
        self._closed = closed
        self._pending: dict[tuple[RequestState, int], Chunk] = {}
        self._live: dict[RequestState, None] = {}
        self._changed = threading.Condition()
        self.stopping = False
        self._thread = threading.Thread(target=self._run, name="response sender", daemon=True)
        self._thread.start()

    def open(self, state: RequestState) -> bool:
        """Register a request; return False after `close`, when nothing would answer it."""
        with self._changed:
            if not self.stopping:
                self._live[state] = None
                self._changed.notify()
            return not self.stopping

    def put(
        self,
        state: RequestState,
        chunk: Chunk | None,
        failure: tuple[str, str] | None = None,
    ) -> None:
        """Queue a chunk of one choice; failure: code and message that end the request."""
        with self._changed:
            if chunk is not None:
                key = (state, chunk.index)
                pending = self._pending.get(key)
                self._pending[key] = chunk if pending is None else join([pending, chunk])
            state.failure = state.failure or failure
            self._changed.notify()

    def close(self, timeout: float, code: str, message: str) -> None:
        with self._changed:
            self.stopping = True
            for state in self._live:
                state.failure = state.failure or (code, message)
            self._changed.notify()
        self._thread.join(timeout)

    def _run(self) -> None:
        next_look = 0.0
        while True:
            with self._changed:
                if not self._pending and not any(state.failure for state in self._live):
                    if self.stopping:
                        return
                    self._changed.wait(POLL if self._live else IDLE)
                pending, self._pending = self._pending, {}
                live = list(self._live)
                failed = [state for state in live if state.failure is not None]
            # first tokens first: clients wait for them most
            for (state, _), chunk in sorted(pending.items(), key=lambda item: _is_later(item[1])):
                self._call_safely(state, self._send, chunk)
            for state in failed:
                self._call_safely(state, self._fail)
            now = time.monotonic()
            if now >= next_look:
                for state in live:
                    if state.deadline is not None and now >= state.deadline:
                        state.deadline = None
                        self._drop(state)
                    self._call_safely(state, self._end_if_cancelled)
                next_look = now + max(POLL, (time.monotonic() - now) / SHARE)

    def _call_safely(self, state: RequestState, do: Callable[..., None], *chunk: Chunk) -> None:
        """Call `do`; an error ends this request only."""
        try:
            do(state, *chunk)
        except Exception:
            log.exception("a response could not be sent", extra=state.log_fields)
            self._close(state)
            self._drop(state)

    def _send(self, state: RequestState, chunk: Chunk) -> None:
        if state not in self._live:
            return
        if chunk.finish_reason:
            state.ended[chunk.index] = chunk
        complete = len(state.ended) == len(state.choices) and state.failure is None
        if complete:  # released before its client, which may ask again at once, gets the answer
            self._close(state)
        if state.streaming:
            state.reply.send([chunk], last=complete)
        elif complete:
            state.reply.send([state.ended[index] for index in sorted(state.ended)], last=True)

    def _fail(self, state: RequestState) -> None:
        if state in self._live and state.failure is not None:
            self._close(state)
            log.info("a request ended with an error: %s", state.failure[0], extra=state.log_fields)
            state.reply.fail(*state.failure)

    def _end_if_cancelled(self, state: RequestState) -> None:
        if state not in self._live or state.gone:
            return
        state.gone = state.reply.cancelled()
        if state.gone:
            self.put(state, None, ("CANCELLED", "The request was cancelled."))
            self._drop(state)

    def _close(self, state: RequestState) -> None:
        with self._changed:
            known = self._live.pop(state, self) is None
        if known:
            self._closed(state)


def _is_later(chunk: Chunk) -> bool:
    return chunk.completion_tokens > len(chunk.token_ids)

"""The thread that talks to Triton: it sends what has come and asks who has gone.

Sending takes 0.1 to 0.4 ms a response, so that the decoding threads leave it to this one; while it
is busy, news of one choice are put together.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from dflash_trt.serving.front.metrics import Metrics
from dflash_trt.serving.front.output_processor import OutputProcessor
from dflash_trt.serving.front.request_output import RequestOutput, append, join_choices

log = logging.getLogger(__name__)

POLL = 0.005  # seconds, at least, between two looks at who has gone ...
SHARE = 0.1  # ... which take so much of the time at most: asking Triton takes 0.04 ms a stream
SELDOM = 8  # only every so many looks include those who hold no row yet
IDLE = 0.5


class Reply(Protocol):
    """Where the answers to one request go."""

    def send(self, part: RequestOutput, *, last: bool) -> None: ...
    def fail(self, code: str, message: str) -> None: ...
    def cancelled(self) -> bool: ...


@dataclass(eq=False)
class RequestState:
    """A client's request with its choices."""

    reply: Reply
    streaming: bool
    deadline: float | None  # time.monotonic()
    choices: list[OutputProcessor]
    gone: bool = False  # the client is no longer there
    client: str = ""
    request_id: str = ""
    places: int = 0  # that it holds: see `Admission`
    ended: dict[int, RequestOutput] = field(default_factory=dict)  # last part of each choice
    failure: tuple[str, str] | None = None  # code and message

    @property
    def named(self) -> dict[str, str]:
        """What a line in the log has beside its message."""
        return {"request_id": self.request_id}

    @property
    def begun(self) -> bool:
        """Whether a choice has had a row."""
        return any(choice.sequence.started is not None for choice in self.choices)


class ResponseSender:
    """Sends parts to streams; `drop` is called for one whose client has gone or waited enough.

    `closed` is called once for each stream, when it has been answered.
    """

    def __init__(
        self,
        drop: Callable[[RequestState], None],
        closed: Callable[[RequestState], None],
        metrics: Metrics,
    ) -> None:
        self._metrics = metrics
        self._drop = drop
        self._closed = closed
        self._pending: dict[tuple[RequestState, int], RequestOutput] = {}
        self._live: dict[RequestState, None] = {}
        self._changed = threading.Condition()
        self.stopping = False
        self._thread = threading.Thread(target=self._run, name="response sender", daemon=True)
        self._thread.start()

    def open(self, stream: RequestState) -> bool:
        """Takes a stream, unless the outbox is closed: then nothing would ever answer it."""
        with self._changed:
            if not self.stopping:
                self._live[stream] = None
                self._changed.notify()
            return not self.stopping

    def post(
        self,
        stream: RequestState,
        part: RequestOutput | None,
        failure: tuple[str, str] | None = None,
    ) -> None:
        """Send a part of one choice, together with others of it that wait.

        failure: code and message of an error that then ends the stream.
        """
        with self._changed:
            if part is not None:
                key = (stream, part.index[0])
                waiting = self._pending.get(key)
                self._pending[key] = part if waiting is None else append(waiting, part)
            stream.failure = stream.failure or failure
            self._changed.notify()

    def close(self, timeout: float, code: str, message: str) -> None:
        """Ends all streams with an error and the thread with them."""
        with self._changed:
            self.stopping = True
            for stream in self._live:
                stream.failure = stream.failure or (code, message)
            self._changed.notify()
        self._thread.join(timeout)

    def _run(self) -> None:
        next_look, looks = 0.0, 0
        while True:
            with self._changed:
                if not self._pending and not any(s.failure for s in self._live):
                    if self.stopping:
                        return
                    self._changed.wait(POLL if self._live else IDLE)
                pending, self._pending = self._pending, {}
                live = list(self._live)
                failed = [stream for stream in live if stream.failure is not None]
            # the first tokens of a text are waited for most
            for (stream, _), part in sorted(pending.items(), key=lambda item: _started(item[1])):
                self._guarded(stream, self._send, part)
            for stream in failed:
                self._guarded(stream, self._end)
            now = time.monotonic()
            if now >= next_look:
                looks += 1
                for stream in live:
                    if stream.deadline is not None and now >= stream.deadline:
                        stream.deadline = None
                        self._drop(stream)
                    if stream.begun or looks % SELDOM == 0:
                        self._guarded(stream, self._look)
                next_look = now + max(POLL, (time.monotonic() - now) / SHARE)

    def _guarded(self, stream: RequestState, do: Callable[..., None], *part: RequestOutput) -> None:
        """One stream's trouble is not the others'."""
        try:
            do(stream, *part)
        except Exception:
            log.exception("a response could not be sent", extra=stream.named)
            self._forget(stream)
            self._drop(stream)

    def _send(self, stream: RequestState, part: RequestOutput) -> None:
        if stream not in self._live:
            return
        if part.finish_reason[0]:
            stream.ended[part.index[0]] = part
        complete = len(stream.ended) == len(stream.choices) and stream.failure is None
        if complete:  # its place is free before its client knows, who may ask again at once
            self._forget(stream)
        if stream.streaming:
            stream.reply.send(part, last=complete)
            if part.token_ids:
                stream.choices[part.index[0]].sent(self._metrics)
        elif complete:
            stream.reply.send(
                join_choices([stream.ended[i] for i in sorted(stream.ended)]), last=True
            )

    def _end(self, stream: RequestState) -> None:
        if stream in self._live and stream.failure is not None:
            self._forget(stream)
            log.info("a request ended with an error: %s", stream.failure[0], extra=stream.named)
            stream.reply.fail(*stream.failure)

    def _look(self, stream: RequestState) -> None:
        if stream not in self._live or stream.gone:
            return
        stream.gone = stream.reply.cancelled()
        if stream.gone:
            self.post(stream, None, ("CANCELLED", "The request was cancelled."))
            self._drop(stream)

    def _forget(self, stream: RequestState) -> None:
        with self._changed:
            known = self._live.pop(stream, self) is None
        if known:
            self._closed(stream)


def _started(part: RequestOutput) -> bool:
    """Whether its choice has been heard of before."""
    return part.completion_tokens[0] > len(part.token_ids)

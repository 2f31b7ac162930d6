"""The public model's logic: requests in, decoding threads, text out.

Triton's threads parse requests and put them into the line. Each group of cache rows has a thread
that runs its rounds; two of them take turns in `verify` and `draft`. A further thread sends. Free
of Triton's types: `model_repository/dflash` adapts them.
"""

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from dflash_trt.decoding.draft_length import DraftLength, measure
from dflash_trt.decoding.line import Line
from dflash_trt.decoding.messages import RunRound
from dflash_trt.decoding.scheduler import Scheduler
from dflash_trt.decoding.sequence import Sequence
from dflash_trt.errors import RequestError
from dflash_trt.serving.chat import Render
from dflash_trt.serving.choice import Choice
from dflash_trt.serving.metrics import Metrics
from dflash_trt.serving.outbox import Outbox, Reply, Stream
from dflash_trt.serving.requests import choices_asked, parse_request
from dflash_trt.serving.settings import Settings

log = logging.getLogger(__name__)

INVALID, UNAVAILABLE, INTERNAL = "INVALID_ARG", "UNAVAILABLE", "INTERNAL"  # Triton's names
CLOSE_TIMEOUT = 2.0  # seconds
IDLE = 0.5  # seconds after which an idle thread looks again
NO_NUMBER = "The model's output for this request is not a number."
STOPPING = "The server is stopping. Try again later."
GROUPS_FROM = 8  # active sequences from which two groups of rows are quicker than one


class EngineGoneError(Exception):
    """A round failed because the process of `verify` or `draft` is gone; others will fail too."""


@dataclass(eq=False)
class _Group:
    """A range of cache rows, decoded by one thread."""

    first_row: int
    rows: int
    scheduler: Scheduler
    thread: threading.Thread = field(init=False)


class Front:
    """Takes requests from any thread and answers them from its own."""

    def __init__(
        self,
        settings: Settings,
        tokenizer: Tokenizer,
        template: Render | None,
        run_round: RunRound,
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._template = template
        self._run_round = run_round
        self._metrics = metrics
        self._draft_length = DraftLength(settings.block_size, settings.draft_tokens)
        self._measured = threading.Event()
        self._line = Line()
        self._where: dict[Sequence, tuple[Stream, Choice]] = {}
        self._dropped: set[Sequence] = set()  # to be ended before the next round
        self._open = 0  # sequences taken and not yet answered
        self._closing = False
        self._changed = threading.Condition()  # guards _open, _closing; told of new work
        self._outbox = Outbox(self._drop, self._close_stream)
        self._groups = [
            _Group(first, rows, self._new_scheduler(first, rows))
            for first, rows in _row_groups(settings)
        ]
        for group in self._groups:
            group.thread = threading.Thread(target=self._run, args=[group], daemon=True)
            group.thread.start()

    def submit(
        self,
        inputs: Mapping[str, "np.ndarray[Any, Any]"],
        reply: Reply,
        timeout: float | None = None,
    ) -> None:
        """Queues a request; bad ones, and those that find the queue full, are answered at once.

        timeout: seconds after which the request ends as it is.
        """
        received = time.monotonic()
        try:
            count = choices_asked(inputs)
        except RequestError as error:
            return self._refuse(reply, INVALID, str(error))
        with self._changed:
            most = self._settings.slots + self._settings.max_queue
            refusal = STOPPING if self._closing else ""
            if self._open + count > most:
                refusal = "The request queue is full. Try again later."
            self._open += 0 if refusal else count
        if refusal:  # before the prompt is looked at: it may be long
            return self._refuse(reply, UNAVAILABLE, refusal)
        try:
            ask = parse_request(inputs, self._tokenizer, self._template, self._settings)
        except Exception as error:
            self._answered(count)
            if isinstance(error, RequestError):
                return self._refuse(reply, INVALID, str(error))
            log.exception("a request could not be read")
            message = "The request could not be read. The server's log says why."
            return self._refuse(reply, INTERNAL, message)
        sequences = [Sequence(request) for request in ask.choices]
        choices = [
            Choice(i, sequence, received, self._tokenizer, ask.stop_words, ask.prefix)
            for i, sequence in enumerate(sequences)
        ]
        deadline = None if timeout is None else received + timeout
        stream = Stream(reply, ask.streaming, deadline, choices)
        if not self._outbox.open(stream):  # closed since we looked
            self._answered(count)
            return self._refuse(reply, UNAVAILABLE, STOPPING)
        for choice in choices:
            self._where[choice.sequence] = stream, choice
            self._line.put(choice.sequence)
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the threads after their current rounds; what is still open is told UNAVAILABLE."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._outbox.close(CLOSE_TIMEOUT, UNAVAILABLE, STOPPING)
        for group in self._groups:
            group.thread.join(CLOSE_TIMEOUT)

    def _new_scheduler(self, first_row: int, rows: int) -> Scheduler:
        return Scheduler(
            self._run_round,
            slots=rows,
            max_seq_len=self._settings.max_seq_len,
            prefill_chunk=self._settings.prefill_chunk,
            draft_length=self._draft_length,
            line=self._line,
            first_row=first_row,
        )

    # --- a group's thread -------------------------------------------------------------------------

    def _run(self, group: _Group) -> None:
        while not self._closing:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closing or group.scheduler.active or self._may_take(group), IDLE
                )
            if group.scheduler.active or self._may_take(group):
                try:
                    self._step(group)
                except Exception as error:
                    self._give_up(group, error)

    def _step(self, group: _Group) -> None:
        self._measure_costs(group)
        scheduler = group.scheduler
        for sequence in self._dropped.intersection(scheduler.sequences):
            scheduler.finish(sequence, "cancelled")
            self._report(sequence)
        before, start = scheduler.active, time.perf_counter()
        news = scheduler.step(take=self._may_take(group))
        self._measure_step(scheduler, time.perf_counter() - start)
        if scheduler.active > before and len(self._groups) > 1:
            with self._changed:  # it may be the other group's turn now
                self._changed.notify_all()
        for sequence in news:
            self._report(sequence)

    def _measure_step(self, scheduler: Scheduler, seconds: float) -> None:
        """Tell the metrics what a step took and what holds after it."""
        report = scheduler.report
        if report is not None and report.prompt_tokens:
            self._metrics.prefill(tokens=report.prompt_tokens, seconds=seconds)
        elif report is not None:
            self._metrics.round(
                verify=report.verify,
                draft=report.draft,
                hop=report.round_trip - report.verify - report.draft,
                scheduler=seconds - report.round_trip,
                sequences=report.sequences,
            )
        schedulers = [group.scheduler for group in self._groups]
        self._metrics.state(
            active=sum(each.active for each in schedulers),
            waiting=len(self._line),
            kv_rows=sum(each.kv_rows for each in schedulers),
        )

    def _may_take(self, group: _Group) -> bool:
        """Whether the next waiting sequence should join this group.

        The first group fills up alone until there are enough for two; then the smaller one grows.
        """
        if not len(self._line):
            return False
        if len(self._groups) == 1:
            return True
        first, second = self._groups
        sizes = first.scheduler.active, second.scheduler.active
        if group is first:
            return sizes[0] < GROUPS_FROM // 2 or sizes[0] <= sizes[1]
        return sizes[0] >= GROUPS_FROM // 2 and sizes[1] < sizes[0]

    def _measure_costs(self, group: _Group) -> None:
        """Once, before the first round: earlier, the models that run a round are not loaded."""
        if self._measured.is_set():
            return
        if group is not self._groups[0]:
            self._measured.wait()
        elif self._draft_length.needs_costs:
            measure(self._run_round, self._draft_length, self._settings.block_size, group.rows)
        self._measured.set()

    def _report(self, sequence: Sequence, code: str = INTERNAL, message: str = NO_NUMBER) -> None:
        """Hand a sequence's news to the outbox; code, message: why, if it ended with an error."""
        stream, choice = self._where[sequence]
        choice.count(self._metrics)
        part = choice.news(final_only=not stream.streaming)
        if sequence.finish_reason is not None:
            self._metrics.finished(sequence.finish_reason)
            del self._where[sequence]
            self._dropped.discard(sequence)
        if part is not None:
            self._outbox.post(stream, part)
        if sequence.finish_reason == "error":
            # its other choices are of no use any more
            self._outbox.fail(stream, code, message)
            self._drop(stream)

    def _give_up(self, group: _Group, error: Exception) -> None:
        """A round failed: its sequences end with an error, the group starts anew."""
        log.error("a round failed", exc_info=error)
        sequences = group.scheduler.sequences
        group.scheduler = self._new_scheduler(group.first_row, group.rows)
        code, message = INTERNAL, "A decoding round failed. The server's log says why."
        if isinstance(error, EngineGoneError):
            code, message = UNAVAILABLE, "An engine is not running. Try again later."
        for sequence in sequences:
            sequence.finish_reason = "error"
            self._report(sequence, code, message)
        self._measured.set()

    # --- called by the outbox or under errors ---------------------------------------------------

    def _drop(self, stream: Stream) -> None:
        """End a request's sequences: those in the line now, the others before a round."""
        for choice in stream.choices:
            sequence = choice.sequence
            if self._line.remove(sequence):
                sequence.finish_reason = "cancelled"
                self._report(sequence)
            elif sequence in self._where:
                self._dropped.add(sequence)
                if sequence not in self._where:  # it ended meanwhile
                    self._dropped.discard(sequence)

    def _refuse(self, reply: Reply, code: str, message: str) -> None:
        self._metrics.finished("refused")
        reply.fail(code, message)

    def _close_stream(self, stream: Stream) -> None:
        self._answered(len(stream.choices))

    def _answered(self, count: int) -> None:
        with self._changed:
            self._open -= count


def _row_groups(settings: Settings) -> list[tuple[int, int]]:
    """First row and number of rows of each group."""
    if settings.mode == "in_process" or settings.slots < GROUPS_FROM:
        return [(0, settings.slots)]
    half = (settings.slots + 1) // 2
    return [(0, half), (half, settings.slots - half)]

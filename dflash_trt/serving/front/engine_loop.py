"""The decoder over our own engines: threads that run rounds.

Each group of cache rows has a thread that runs its rounds; two of them take turns in `verify` and
`draft`.
"""

import logging
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer

from dflash_trt.build.settings import Settings
from dflash_trt.decoding import Grammars, Request, RunRound, Scheduler, Sequence, WaitingQueue
from dflash_trt.decoding.speculation import CostProfile, profile_of, strategy
from dflash_trt.engines import engine_kind, read_info
from dflash_trt.serving.front.metrics import Metrics
from dflash_trt.serving.front.request_handler import INTERNAL, NO_NUMBER, UNAVAILABLE, Deliver

log = logging.getLogger(__name__)

WAIT_LOADED = 0.2  # seconds before each look at whether the models are there
IDLE = 0.5  # seconds after which an idle thread looks again
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


class EngineLoop:
    """A `front.Decoder` over `run_round`."""

    def __init__(
        self,
        settings: Settings,
        engines: Path,
        run_round: RunRound,
        metrics: Metrics,
        tokenizer: Tokenizer,
    ) -> None:
        """engines: the directory with those of both models."""
        self._engines = engines
        self._target = read_info(engines / "target", engine_kind(engines / "target"))
        self._settings = settings
        vocab_size = self._target.vocab_size
        self._grammars = Grammars(tokenizer, vocab_size, settings.eos_token_ids)
        self._run_round = run_round
        self._metrics = metrics
        self._costs: CostProfile | None = None
        self._measured = threading.Event()
        self._closing = False
        self._changed = threading.Condition()  # guards _closing; told of new work

    def new_sequence(self, request: Request) -> Sequence:
        """See `Decoder`. Its grammar is compiled here, in the thread that reads requests."""
        grammar = request.grammar
        return Sequence(request, matcher=self._grammars.matcher(grammar) if grammar else None)

    def start(self, queue: WaitingQueue[Sequence], deliver: Deliver) -> None:
        self._queue, self._deliver = queue, deliver
        self._groups = [
            _Group(first, rows, self._new_scheduler(first, rows))
            for first, rows in _row_groups(self._settings)
        ]
        for group in self._groups:
            group.thread = threading.Thread(target=self._run, args=[group], daemon=True)
            group.thread.start()

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def close(self, timeout: float) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for group in self._groups:
            group.thread.join(timeout)

    def _new_scheduler(self, first_row: int, rows: int) -> Scheduler:
        settings = self._settings
        policy, proposer = strategy(settings.speculation, self._target, self._costs)
        return Scheduler(
            self._run_round,
            slots=rows,
            max_seq_len=settings.max_seq_len,
            prefill_chunk=settings.prefill_chunk,
            policy=policy,
            proposer=proposer,
            queue=self._queue,
            first_slot=first_row,
        )

    def _run(self, group: _Group) -> None:
        self._prepare(group)
        while not self._closing:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closing or group.scheduler.active or self._may_take(group), IDLE
                )
            if group.scheduler.active or self._may_take(group):
                held = group.scheduler.sequences
                try:
                    self._step(group, held)
                except Exception as error:
                    self._give_up(group, held, error)

    def _step(self, group: _Group, held: list[Sequence]) -> None:
        scheduler = group.scheduler
        for sequence in scheduler.sequences:
            if sequence.dropped:
                scheduler.finish(sequence, "cancelled")
                self._deliver(sequence)
        before, start = scheduler.active, time.perf_counter()
        news = scheduler.step(take=self._may_take(group))
        seconds = time.perf_counter() - start
        held += news  # one may have come and ended in this very step
        for sequence in news:
            self._deliver(sequence, message=sequence.failure or NO_NUMBER)
        self._measure_step(scheduler, seconds)
        if scheduler.active > before and len(self._groups) > 1:
            self.wake()  # it may be the other group's turn now

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
                choices=report.choices,
            )
        schedulers = [group.scheduler for group in self._groups]
        self._metrics.state(
            active=sum(each.active for each in schedulers),
            waiting=len(self._queue),
            kv_rows=sum(each.kv_rows for each in schedulers),
        )

    def _may_take(self, group: _Group) -> bool:
        """Whether the next waiting sequence should join this group.

        The first group fills up alone until there are enough for two; then the smaller one grows.
        """
        if not len(self._queue):
            return False
        if len(self._groups) == 1:
            return True
        first, second = self._groups
        sizes = first.scheduler.active, second.scheduler.active
        if group is first:
            return sizes[0] < GROUPS_FROM // 2 or sizes[0] <= sizes[1]
        return sizes[0] >= GROUPS_FROM // 2 and sizes[1] < sizes[0]

    def _prepare(self, group: _Group) -> None:
        """Know what rounds cost before any is run; the first group's thread measures it."""
        if group is self._groups[0]:
            if self._settings.speculation.policy == "adaptive":
                self._measure_costs()
            self._measured.set()
        self._measured.wait()
        group.scheduler = self._new_scheduler(group.first_row, group.rows)

    def _measure_costs(self) -> None:
        """As soon as the models that run rounds are loaded."""
        if self._settings.mode == "ensemble":
            # a call of another model while this one is still being loaded crashes the server, whose
            # threads for it are made last (python_be.cc, LaunchStubProcess)
            time.sleep(WAIT_LOADED)
        while not self._closing:
            try:
                self._costs = profile_of(self._engines, self._settings.mode, self._run_round)
                self._metrics.costs(self._costs)
                return
            except EngineGoneError:
                time.sleep(WAIT_LOADED)
            except Exception:
                log.exception("steps cannot be measured; the policy is fixed")
                return

    def _give_up(self, group: _Group, held: list[Sequence], error: Exception) -> None:
        """A step failed: its sequences end with an error, the group starts anew.

        held: those that had slots before or after it; some may have ended in it, unreported.
        """
        log.error("a round failed", exc_info=error)
        sequences = dict.fromkeys([*held, *group.scheduler.sequences])
        group.scheduler = self._new_scheduler(group.first_row, group.rows)
        code, message = INTERNAL, "A decoding round failed. The server's log says why."
        if isinstance(error, EngineGoneError):
            code, message = UNAVAILABLE, "An engine is not running. Try again later."
        for sequence in sequences:
            sequence.finish_reason = sequence.finish_reason or "error"
            self._deliver(sequence, code, message)


def _row_groups(settings: Settings) -> list[tuple[int, int]]:
    """First row and number of rows of each group."""
    if settings.mode == "in_process" or settings.slots < GROUPS_FROM:
        return [(0, settings.slots)]
    half = (settings.slots + 1) // 2
    return [(0, half), (half, settings.slots - half)]

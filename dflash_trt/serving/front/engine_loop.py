"""The decoder over our own engines: threads that run rounds.

Each group of slots has a thread and a scheduler. Two groups alternate: while one is in `draft`, the
other is in `verify`.
"""

import logging
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer

from dflash_trt.build.settings import Settings
from dflash_trt.chat import has_channels
from dflash_trt.decoding import (
    Grammars,
    PrefixCache,
    Request,
    RunRound,
    Scheduler,
    SequenceState,
    WaitingQueue,
    block_bytes,
)
from dflash_trt.decoding.speculation import CostProfile, profile_of, strategy
from dflash_trt.engines import engine_kind, read_info, read_infos
from dflash_trt.errors import RequestError
from dflash_trt.serving.front.metrics import Metrics
from dflash_trt.serving.front.request_handler import INTERNAL, NO_NUMBER, UNAVAILABLE, Deliver

log = logging.getLogger(__name__)

WAIT_LOADED = 0.2  # seconds between checks that the models are loaded
IDLE = 0.5  # seconds after which an idle thread looks again
TWO_GROUPS_FROM = 8  # active sequences from which two groups are faster than one
ROUND_FAILED = "A decoding round failed. The server's log says why."
ENGINE_GONE = "An engine is not running. Try again later."


class EngineGoneError(Exception):
    """A round failed because the process of `verify` or `draft` is gone; others will fail too."""


@dataclass(eq=False)
class _SlotGroup:
    """Slots `first` to `first + slots - 1`, decoded by one thread."""

    first: int
    slots: int
    scheduler: Scheduler
    outdated: bool = False  # its drafts are from a drafter that has been replaced
    thread: threading.Thread = field(init=False)


class EngineLoop:
    """A `request_handler.Decoder` over `run_round`."""

    def __init__(
        self,
        settings: Settings,
        engines: Path,
        run_round: RunRound,
        metrics: Metrics,
        tokenizer: Tokenizer,
    ) -> None:
        """Set up; engines: the directory that holds both models' engines."""
        self._engines = engines
        self._target = read_info(engines / "target", engine_kind(engines / "target"))
        self._settings = settings
        vocab_size = self._target.vocab_size
        self._channels = has_channels(tokenizer)
        self._grammars = Grammars(tokenizer, vocab_size, settings.eos_token_ids)
        self._prefix_cache = self._new_prefix_cache()
        self._run_round = run_round
        self._metrics = metrics
        self._costs: CostProfile | None = None
        self._measured = threading.Event()
        self._closing = False
        self._changed = threading.Condition()  # guards _closing; notified of new work

    def new_sequence(self, request: Request) -> SequenceState:
        """Return a sequence with its grammar compiled, in the thread that parses requests."""
        grammar = request.grammar
        if grammar and grammar.kind != "lark" and self._channels:
            raise RequestError(
                f"{grammar.name} is not possible: this model answers in channels",
                "Send a guided_grammar that has them in it.",
            )
        return SequenceState(request, matcher=self._grammars.matcher(grammar) if grammar else None)

    def start(self, queue: WaitingQueue[SequenceState], deliver: Deliver) -> None:
        self._queue, self._deliver = queue, deliver
        self._groups = [
            _SlotGroup(first, slots, self._new_scheduler(first, slots))
            for first, slots in _slot_groups(self._settings)
        ]
        for group in self._groups:
            group.thread = threading.Thread(target=self._run, args=[group], daemon=True)
            group.thread.start()

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def change_drafter(self, *, done: bool) -> None:
        """Pause the prefix cache or mark groups outdated: their sequences go on without drafts."""
        if not done and self._prefix_cache is not None:
            self._prefix_cache.hold(True)
        for group in self._groups:
            group.outdated = done
        self.wake()

    def close(self, timeout: float) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for group in self._groups:
            group.thread.join(timeout)

    def _new_scheduler(self, first: int, slots: int) -> Scheduler:
        settings = self._settings
        policy, proposer = strategy(settings.speculation, self._target, self._costs)
        return Scheduler(
            self._run_round,
            slots=slots,
            max_seq_len=settings.max_seq_len,
            prefill_chunk=settings.prefill_chunk,
            policy=policy,
            proposer=proposer,
            queue=self._queue,
            first_slot=first,
            prefix_cache=self._prefix_cache,
        )

    def _new_prefix_cache(self) -> PrefixCache | None:
        if not self._settings.prefix_cache:
            return None
        self._block_bytes = block_bytes(read_infos(self._engines))
        return PrefixCache(self._settings.prefix_cache * 2**20 // self._block_bytes)

    def _run(self, group: _SlotGroup) -> None:
        self._prepare(group)
        while not self._closing:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._has_work(group), IDLE)
            if self._has_work(group):
                sequences = group.scheduler.sequences
                try:
                    self._step(group, sequences)
                except Exception as error:
                    self._fail(group, sequences, error)

    def _has_work(self, group: _SlotGroup) -> bool:
        scheduler, others = group.scheduler, len(self._groups) > 1
        waits = self._may_take(group) or (others and scheduler.unsaved)
        return bool(scheduler.active or waits or group.outdated)

    def _step(self, group: _SlotGroup, sequences: list[SequenceState]) -> None:
        """Run one scheduler step; add sequences that joined to `sequences`."""
        scheduler = group.scheduler
        if group.outdated:
            self._leave_drafter(group)
        for sequence in scheduler.sequences:
            if sequence.dropped:
                scheduler.finish(sequence, "cancelled")
                self._deliver(sequence)
        beside = any(each.scheduler.active for each in self._groups if each is not group)
        before, start = scheduler.active, time.perf_counter()
        advanced = scheduler.step(take=self._may_take(group), beside=beside)
        seconds = time.perf_counter() - start
        sequences += advanced  # one may have joined and ended in this step
        for sequence in advanced:
            self._deliver(sequence, message=sequence.failure or NO_NUMBER)
        self._count(scheduler, seconds)
        if scheduler.active > before and len(self._groups) > 1:
            self.wake()  # the other group may take the next one

    def _leave_drafter(self, group: _SlotGroup) -> None:
        for sequence in group.scheduler.sequences:
            sequence.lose_drafter()
        group.outdated = False
        if self._prefix_cache is not None and not any(each.outdated for each in self._groups):
            self._prefix_cache.hold(False)

    def _count(self, scheduler: Scheduler, seconds: float) -> None:
        """Report a step that took `seconds` to the metrics, and the state after it."""
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
            kept=0 if self._prefix_cache is None else len(self._prefix_cache) * self._block_bytes,
        )

    def _may_take(self, group: _SlotGroup) -> bool:
        """Return whether the next waiting sequence goes to this group.

        The first group fills alone up to half of TWO_GROUPS_FROM; then the smaller one grows.
        """
        if not len(self._queue):
            return False
        if len(self._groups) == 1:
            return True
        first, second = (each.scheduler.active for each in self._groups)
        if group is self._groups[0]:
            return first < TWO_GROUPS_FROM // 2 or first <= second
        return first >= TWO_GROUPS_FROM // 2 and second < first

    def _prepare(self, group: _SlotGroup) -> None:
        """Measure the costs of rounds in the first group's thread; the others wait for it."""
        if group is self._groups[0]:
            if self._settings.speculation.policy == "adaptive":
                self._measure_costs()
            self._measured.set()
        self._measured.wait()
        group.scheduler = self._new_scheduler(group.first, group.slots)

    def _measure_costs(self) -> None:
        """Measure as soon as the models that run rounds are loaded."""
        if self._settings.mode == "ensemble":
            # calling another model while this one loads crashes the server, whose threads for it
            # are made last (python_be.cc, LaunchStubProcess)
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

    def _fail(self, group: _SlotGroup, sequences: list[SequenceState], error: Exception) -> None:
        """End a failed step's sequences with an error and give the group a new scheduler.

        sequences: had slots before the step; some may have ended in it without delivery.
        """
        log.error("a round failed", exc_info=error)
        failed = dict.fromkeys([*sequences, *group.scheduler.sequences])
        group.scheduler.forget()
        group.scheduler = self._new_scheduler(group.first, group.slots)
        code, message = INTERNAL, ROUND_FAILED
        if isinstance(error, EngineGoneError):
            code, message = UNAVAILABLE, ENGINE_GONE
        for sequence in failed:
            sequence.finish_reason = sequence.finish_reason or "error"
            self._deliver(sequence, code, message)


def _slot_groups(settings: Settings) -> list[tuple[int, int]]:
    """Return (first slot, number of slots) of each group."""
    if settings.mode == "in_process" or settings.slots < TWO_GROUPS_FROM:
        return [(0, settings.slots)]
    half = (settings.slots + 1) // 2
    return [(0, half), (half, settings.slots - half)]

"""The decoder over our own engines: a thread that runs the scheduler."""

import logging
import queue
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer

from dflash_trt.chat import has_channels
from dflash_trt.decoding import (
    Grammars,
    PrefixCache,
    Request,
    Round,
    RoundResult,
    Scheduler,
    SequenceState,
    WaitingQueue,
    block_bytes,
    in_process,
    measure,
    open_prefix_cache,
    strategy,
)
from dflash_trt.engines import load_engine, load_engines, read_info, read_infos
from dflash_trt.errors import RequestError
from dflash_trt.serving.model.metrics import Metrics
from dflash_trt.serving.model.request_handler import (
    INTERNAL,
    NON_FINITE,
    UNAVAILABLE,
    Deliver,
)
from dflash_trt.speculation import CostProfile
from dflash_trt.wire import Settings

log = logging.getLogger(__name__)

WAIT_LOADED = 0.2  # seconds between checks that the models are loaded
IDLE = 0.5  # seconds after which an idle thread looks again
ROUND_FAILED = "A decoding round failed. The server's log says why."
ENGINE_GONE = "An engine is not running. Try again later."


class EngineGoneError(Exception):
    """A round failed because the process of `verify` or `draft` is gone; others will fail too."""


class Rounds(Protocol):
    """A `RunRound` whose drafter can be replaced."""

    def __call__(self, round: Round) -> RoundResult: ...

    def load_drafter(self, engine: Path) -> None:
        """Have later rounds draft by the engine in this directory; an error leaves the old one."""


class RoundsInProcess:
    """Rounds on the engines of a build, in this process."""

    def __init__(self, engines: Path) -> None:
        self._target, drafter = load_engines(engines)
        self._run = in_process(self._target, drafter)

    def __call__(self, round: Round) -> RoundResult:
        return self._run(round)

    def load_drafter(self, engine: Path) -> None:
        self._run = in_process(self._target, load_engine(engine))


@dataclass(frozen=True)
class _Replacement:
    """A drafter that is to serve."""

    engine: Path
    done: "Future[None]"


class EngineLoop:
    """A `request_handler.Decoder` on our own engines."""

    def __init__(
        self,
        settings: Settings,
        engines: Path,
        rounds: Rounds,
        metrics: Metrics,
        tokenizer: Tokenizer,
    ) -> None:
        self._target = read_info(engines / "target")
        self._settings = settings
        vocab_size = self._target.vocab_size
        self._channels = has_channels(tokenizer)
        self._grammars = Grammars(tokenizer, vocab_size, settings.eos_token_ids)
        self._prefix_cache: PrefixCache | None = None
        if settings.prefix_cache:
            infos = read_infos(engines)
            self._block_bytes = block_bytes(infos)
            self._prefix_cache = open_prefix_cache(settings.prefix_cache * 2**20, infos)
        self._rounds = rounds
        self._metrics = metrics
        self._costs: CostProfile | None = None
        self._replacements: queue.SimpleQueue[_Replacement] = queue.SimpleQueue()
        self._closing = False
        self._changed = threading.Condition()  # guards it; notified of new work

    def is_ready_for(self, request: Request) -> bool:
        return request.grammar is None or self._grammars.is_ready(request.grammar)

    def new_sequence(self, request: Request) -> SequenceState:
        grammar = request.grammar
        if grammar and grammar.kind != "lark" and self._channels:
            raise RequestError(
                f"{grammar.name} is not possible: this model answers in channels",
                "Send a guided_grammar that has them in it.",
            )
        return SequenceState(request, matcher=self._grammars.matcher(grammar) if grammar else None)

    def start(self, queue: WaitingQueue[SequenceState], deliver: Deliver) -> None:
        self._queue, self._deliver = queue, deliver
        self._scheduler = self._new_scheduler()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def load_drafter(self, engine: Path) -> None:
        """Have the thread replace the drafter between two steps; wait for that."""
        replacement = _Replacement(engine, Future())
        self._replacements.put(replacement)
        self.wake()
        replacement.done.result()

    def close(self, timeout: float) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout)

    def _new_scheduler(self) -> Scheduler:
        settings = self._settings
        policy, proposer = strategy(settings.speculation, self._target, self._costs)
        return Scheduler(
            self._rounds,
            slots=settings.slots,
            max_seq_len=settings.max_seq_len,
            prefill_chunk=min(settings.prefill_chunk, self._target.widest),
            policy=policy,
            proposer=proposer,
            queue=self._queue,
            prefix_cache=self._prefix_cache,
        )

    def _run(self) -> None:
        if self._settings.speculation.policy == "adaptive":
            self._measure_costs_once_loaded()
            self._scheduler = self._new_scheduler()
        while not self._closing:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._has_work(), IDLE)
            if self._has_work():
                sequences = self._scheduler.sequences
                try:
                    self._step(sequences)
                except Exception as error:
                    self._end_failed_step(sequences, error)

    def _has_work(self) -> bool:
        return self._scheduler.has_work or not self._replacements.empty()

    def _step(self, sequences: list[SequenceState]) -> None:
        """Run one scheduler step; add sequences that joined to `sequences`."""
        scheduler = self._scheduler
        if not self._replacements.empty():
            self._replace_drafter(self._replacements.get())
        for sequence in scheduler.sequences:
            if sequence.dropped:
                scheduler.finish(sequence, "cancelled")
                self._deliver(sequence)
        start = time.perf_counter()
        advanced = scheduler.step()
        seconds = time.perf_counter() - start
        sequences += advanced  # one may have joined and ended in this step
        for sequence in advanced:
            self._deliver(sequence, message=sequence.failure or NON_FINITE)
        self._report_step(scheduler, seconds)

    def _replace_drafter(self, replacement: _Replacement) -> None:
        """Load a drafter. It has seen no tokens: texts that run go on without drafts."""
        try:
            self._rounds.load_drafter(replacement.engine)
        except Exception as error:
            replacement.done.set_exception(error)
            return
        for sequence in self._scheduler.sequences:
            sequence.lose_drafter()
        if self._prefix_cache is not None:
            self._prefix_cache.clear()
        replacement.done.set_result(None)

    def _report_step(self, scheduler: Scheduler, seconds: float) -> None:
        report = scheduler.report
        if report is not None and report.prompt_tokens:
            self._metrics.count_prefill(tokens=report.prompt_tokens, seconds=seconds)
        elif report is not None:
            self._metrics.count_round(
                verify=report.verify_seconds,
                draft=report.draft_seconds,
                hop=report.round_trip - report.verify_seconds - report.draft_seconds,
                scheduler=seconds - report.round_trip,
                sequences=report.sequences,
                choices=report.choices,
            )
        self._metrics.set_gauges(
            active=scheduler.active,
            waiting=len(self._queue),
            kv_entries=scheduler.kv_entries,
            cache_bytes=0
            if self._prefix_cache is None
            else self._prefix_cache.used * self._block_bytes,
        )

    def _measure_costs_once_loaded(self) -> None:
        if self._settings.mode == "ensemble":
            # calling another model while this one loads crashes the server, whose threads for it
            # are made last (python_be.cc, LaunchStubProcess)
            time.sleep(WAIT_LOADED)
        while not self._closing:
            try:
                self._costs = measure(self._rounds, self._target)
                return
            except EngineGoneError:
                time.sleep(WAIT_LOADED)
            except Exception:
                log.exception("steps cannot be measured; the policy is fixed")
                return

    def _end_failed_step(self, sequences: list[SequenceState], error: Exception) -> None:
        """End `sequences`, of which some may have ended in this step without delivery."""
        log.error("a round failed", exc_info=error)
        failed = dict.fromkeys([*sequences, *self._scheduler.sequences])
        self._scheduler.forget()
        self._scheduler = self._new_scheduler()
        code, message = INTERNAL, ROUND_FAILED
        if isinstance(error, EngineGoneError):
            code, message = UNAVAILABLE, ENGINE_GONE
        for sequence in failed:
            sequence.finish_reason = sequence.finish_reason or "error"
            self._deliver(sequence, code, message)

"""A pass of one method over the prompts, which may alternate with other methods."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from pathlib import Path
from random import Random

from dflash_trt.bench.results import Cell, Sample
from dflash_trt.decoding import Request, RunRound, Scheduler, SequenceState
from dflash_trt.decoding.speculation import Policy, Proposer
from dflash_trt.engines import Step, load_engine

# the shorter of both ends a turn: other load on the machine must slow all methods alike
TURN = 32  # tokens per stream, so that all are at the same part of a text
TURN_SECONDS = 0.1


class TimedEngine:
    """An engine that sums the seconds of its calls."""

    def __init__(self, directory: Path) -> None:
        self._engine = load_engine(directory)
        self.info, self.visible_step = self._engine.info, self._engine.visible_step
        self.least_rows = self._engine.least_rows
        self.seconds = 0.0

    def step(
        self, row: int, n: int, width: int, visible: int, scored: int, context: int = 0
    ) -> Step:
        step = self._engine.step(row, n, width, visible, scored, context)
        return replace(step, run=partial(self._run, step.run))

    def move_row(self, source: int, destination: int, tokens: int, start: int = 0) -> None:
        self._engine.move_row(source, destination, tokens, start)

    def _run(self, run: Callable[[], object]) -> None:
        start = time.perf_counter()
        run()
        self.seconds += time.perf_counter() - start


@dataclass
class Decoder:
    """One method: the parts of its scheduler, and its results."""

    cell: Cell
    rounds: RunRound
    policy: Policy
    proposer: Proposer | None
    engines: list[TimedEngine]  # the target first
    first_row: int = 0  # of its cache rows
    passes: list[list[SequenceState]] = field(default_factory=list)


class Pass:
    """Decoding of all requests, `batch` at a time, past stop tokens, for equal work."""

    def __init__(self, decoder: Decoder, requests: Sequence[Request], batch: int) -> None:
        self._decoder = decoder
        longest = decoder.engines[0].info.max_seq_len
        self._scheduler = Scheduler(
            decoder.rounds,
            slots=batch,
            max_seq_len=longest,
            prefill_chunk=longest,
            policy=decoder.policy,
            proposer=decoder.proposer,
            first_slot=decoder.first_row,
        )
        self._streams = min(batch, len(requests))
        self._sequences = [self._scheduler.submit(request) for request in requests]
        self._sample = Sample()

    @property
    def ended(self) -> bool:
        return not self._scheduler.busy

    @property
    def pace(self) -> float:
        """Seconds per token of each stream; requires at least one token."""
        return self._streams * self._sample.seconds / self._sample.tokens

    def run(self, tokens: float = inf) -> None:
        """Run until the streams have about `tokens` tokens each in total, or to the end."""
        while not self.ended and self._sample.tokens < tokens * self._streams:
            self._step()

    def keep(self) -> None:
        """Add the results to the decoder."""
        self._sample.rounds = sum(sequence.rounds for sequence in self._sequences)
        self._decoder.cell.samples.append(self._sample)
        self._decoder.passes.append(self._sequences)

    def _step(self) -> None:
        sample, engines = self._sample, self._decoder.engines
        before = [engine.seconds for engine in engines]
        start = time.perf_counter()
        stepped = self._scheduler.step()
        took = time.perf_counter() - start
        sample.seconds += took
        report = self._scheduler.report
        if report is None or report.prompt_tokens:
            sample.prefill += took
            sample.tokens += len(stepped)  # one for each completed prompt
            return
        in_target, *others = (
            engine.seconds - was for engine, was in zip(engines, before, strict=True)
        )
        sample.steps += 1
        sample.verify += in_target
        sample.draft += sum(others)
        sample.sampling += report.round_trip - in_target - sum(others)
        sample.scheduler += took - report.round_trip
        for choice in report.choices:
            sample.choices[choice] = sample.choices.get(choice, 0) + 1
        committed = sum(sequence.committed_per_round[-1] for sequence in stepped)
        sample.tokens += committed
        if len(stepped) == self._streams:
            sample.full_seconds += took
            sample.full_tokens += committed


def run_in_turns(passes: Sequence[Pass]) -> None:
    """Run all passes to their ends, in turns.

    The order is random: the first rounds after a drafting method take longer, which would always
    affect the same method.
    """
    dice, tokens = Random(0), 1.0
    while going := [each for each in passes if not each.ended]:
        for each in dice.sample(going, len(going)):
            each.run(tokens)
        slowest = max(each.pace for each in passes)
        tokens += min(max(TURN_SECONDS / slowest, 1.0), TURN)
    for each in passes:
        each.keep()

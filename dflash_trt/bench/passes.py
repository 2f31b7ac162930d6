"""A pass of one way of decoding over the prompts, which other ways' turns may interrupt."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from pathlib import Path
from random import Random

from dflash_trt.bench.results import Cell, Sample
from dflash_trt.decoding import Request, RunRound, Scheduler
from dflash_trt.decoding import Sequence as Decoded
from dflash_trt.decoding.speculation.policy import Policy
from dflash_trt.decoding.speculation.proposals import Proposer
from dflash_trt.engines.load import load_engine
from dflash_trt.engines.step import Engine, Step

TURN = 32  # tokens of each stream: all ways come to the same stretch of text at about the same time
TURN_SECONDS = 0.1  # where that is sooner: what else the machine does must meet all ways


class TimedEngine:
    """An engine of any kind that adds up the seconds of its calls."""

    def __init__(self, directory: Path) -> None:
        self._engine = load_engine(directory)
        self.info, self.visible_step = self._engine.info, self._engine.visible_step
        self.seconds = 0.0

    def step(
        self, row: int, n: int, width: int, visible: int, scored: int, context: int = 0
    ) -> Step:
        step = self._engine.step(row, n, width, visible, scored, context)
        return replace(step, run=partial(self._run, step.run))

    def move_row(self, source: int, destination: int, tokens: int) -> None:
        self._engine.move_row(source, destination, tokens)

    def keep_tokens(self, row: int, start: int, kept: Sequence[int]) -> None:
        self._engine.keep_tokens(row, start, kept)

    def _run(self, run: Callable[[], object]) -> None:
        start = time.perf_counter()
        run()
        self.seconds += time.perf_counter() - start


@dataclass
class Way:
    """One method with its scheduler's parts and what it has decoded."""

    cell: Cell
    rounds: RunRound
    policy: Policy
    proposer: Proposer | None
    engines: list[TimedEngine]  # the target first
    first_row: int = 0  # of its cache rows
    passes: list[list[Decoded]] = field(default_factory=list)


class Pass:
    """All requests, `batch` at a time; stop tokens are ignored, so that all ways do the same."""

    def __init__(self, way: Way, target: Engine, requests: Sequence[Request], batch: int) -> None:
        self._way = way
        self._scheduler = Scheduler(
            way.rounds,
            slots=batch,
            max_seq_len=target.info.max_seq_len,
            prefill_chunk=target.info.max_seq_len,
            policy=way.policy,
            proposer=way.proposer,
            first_slot=way.first_row,
        )
        self._streams = min(batch, len(requests))
        self._sequences = [self._scheduler.submit(request) for request in requests]
        self._sample = Sample()

    @property
    def ended(self) -> bool:
        return not self._scheduler.busy

    @property
    def pace(self) -> float:
        """Seconds that a token of each stream took; to be asked behind the first."""
        return self._streams * self._sample.seconds / self._sample.tokens

    def run(self, tokens: float = inf) -> None:
        """On until its streams have had about so many tokens each in all, or to the end."""
        while not self.ended and self._sample.tokens < tokens * self._streams:
            self._step()

    def keep(self) -> None:
        """Hand what was measured and decoded to the way."""
        self._sample.rounds = sum(sequence.rounds for sequence in self._sequences)
        self._way.cell.samples.append(self._sample)
        self._way.passes.append(self._sequences)

    def _step(self) -> None:
        sample, engines = self._sample, self._way.engines
        before = [engine.seconds for engine in engines]
        start = time.perf_counter()
        stepped = self._scheduler.step()
        took = time.perf_counter() - start
        sample.seconds += took
        report = self._scheduler.report
        if report is None or report.prompt_tokens:
            sample.prefill += took
            sample.tokens += len(stepped)  # those whose prompt is in have their first one
            return
        in_engines = [engine.seconds - was for engine, was in zip(engines, before, strict=True)]
        sample.steps += 1
        sample.verify += in_engines[0]
        sample.draft += sum(in_engines[1:])
        sample.sampling += report.round_trip - sum(in_engines)
        sample.scheduler += took - report.round_trip
        for choice in report.choices:
            sample.choices[choice] = sample.choices.get(choice, 0) + 1
        committed = sum(sequence.committed_per_round[-1] for sequence in stepped)
        sample.tokens += committed
        if len(stepped) == self._streams:
            sample.full_seconds += took
            sample.full_tokens += committed


def run_in_turns(passes: Sequence[Pass]) -> None:
    """All of them to their ends.

    In another order each time: the first rounds behind a way that drafts take longer, which would
    always meet the same way.
    """
    dice, tokens = Random(0), 1.0
    while going := [each for each in passes if not each.ended]:
        for each in dice.sample(going, len(going)):
            each.run(tokens)
        slowest = max(each.pace for each in passes)
        tokens += min(max(TURN_SECONDS / slowest, 1.0), TURN)
    for each in passes:
        each.keep()

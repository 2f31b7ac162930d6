"""A pass of one method over the prompts, which may alternate with other methods."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from random import Random

from dflash_trt.bench.results import Cell, Sample
from dflash_trt.decoding import Proposer, Request, RunRound, Scheduler, SequenceState
from dflash_trt.engines import EngineInfo
from dflash_trt.speculation import Policy

# the shorter of both ends a turn: other load on the machine must slow all methods alike
TURN = 32  # tokens per stream, so that all are at the same part of a text
TURN_SECONDS = 0.1


@dataclass
class Decoder:
    cell: Cell  # takes the results
    rounds: RunRound
    policy: Policy
    proposer: Proposer | None
    target: EngineInfo
    first_slot: int = 0
    passes: list[list[SequenceState]] = field(default_factory=list)


class Pass:
    """Decoding of all requests, `batch` at a time, past stop tokens, for equal work."""

    def __init__(self, decoder: Decoder, requests: Sequence[Request], batch: int) -> None:
        self._decoder = decoder
        self._scheduler = Scheduler(
            decoder.rounds,
            slots=batch,
            max_seq_len=decoder.target.max_seq_len,
            prefill_chunk=decoder.target.widest,
            policy=decoder.policy,
            proposer=decoder.proposer,
            first_slot=decoder.first_slot,
        )
        self._streams = min(batch, len(requests))
        self._sequences = [self._scheduler.submit(request) for request in requests]
        self._sample = Sample()

    @property
    def ended(self) -> bool:
        return not self._scheduler.has_work

    @property
    def pace(self) -> float:
        """Seconds per token of each stream; requires at least one token."""
        return self._streams * self._sample.seconds / self._sample.tokens

    def run(self, tokens: float = inf) -> None:
        """Run until the streams have about `tokens` tokens each in total, or to the end."""
        while not self.ended and self._sample.tokens < tokens * self._streams:
            self._step()

    def store_results(self) -> None:
        self._sample.rounds = sum(sequence.rounds for sequence in self._sequences)
        self._decoder.cell.samples.append(self._sample)
        self._decoder.passes.append(self._sequences)

    def _step(self) -> None:
        sample = self._sample
        start = time.perf_counter()
        stepped = self._scheduler.step()
        took = time.perf_counter() - start
        sample.seconds += took
        report = self._scheduler.report
        if report is None or report.prompt_tokens:
            sample.prefill += took
            sample.tokens += len(stepped)  # one for each completed prompt
            return
        sample.steps += 1
        sample.verify += report.verify_seconds
        sample.draft += report.draft_seconds
        sample.scheduler += took - report.verify_seconds - report.draft_seconds
        committed = sum(sequence.committed_per_round[-1] for sequence in stepped)
        sample.tokens += committed
        if len(stepped) == self._streams:
            sample.full_seconds += took
            sample.full_tokens += committed


def run_in_turns(passes: Sequence[Pass]) -> None:
    # in random order: a method that drafts slows the rounds after it, which must not always be the
    # same method's
    dice = Random(0)
    tokens = 1.0
    running = [one for one in passes if not one.ended]
    while running:
        for one in dice.sample(running, len(running)):
            one.run(tokens)
        slowest = max(one.pace for one in passes)
        tokens += min(max(TURN_SECONDS / slowest, 1.0), TURN)
        running = [one for one in passes if not one.ended]
    for one in passes:
        one.store_results()

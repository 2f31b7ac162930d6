"""What rounds cost: measured on made-up and on real engines."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dflash_trt.decoding import in_process, measure
from dflash_trt.decoding.messages import (
    DraftResult,
    Features,
    Round,
    RoundResult,
    SequenceResult,
)
from dflash_trt.decoding.profiling import BUDGET, MAX_BUDGET
from dflash_trt.engines.step import load_engine
from dflash_trt.speculation import CostProfile
from tests.support.built_pairs import BuildPair

HOP = 0.25e-3


class Machine:
    """A `RunRound` of made-up costs, on its own clock."""

    def __init__(self, scale: float = 1.0, spikes: int = 0) -> None:
        self.scale, self.spikes = scale, spikes  # each so-many-th round takes ten times as long
        self.now, self.rounds = 0.0, 0

    def verify(self, n: int, width: int, context: int) -> float:
        return self.scale * (1e-3 + 1e-4 * n * width + 1e-7 * n * context + 1e-8 * width * context)

    def draft(self, n: int, context: int) -> float:
        return self.scale * (5e-4 + 1e-4 * n + 1e-7 * n * context)

    def sampling(self, n: int) -> float:
        return self.scale * 2e-4 * n

    def __call__(self, round: Round) -> RoundResult:
        n, width, context = len(round.sequences), round.width, round.sequences[0].position
        assert all(len(sequence.tokens) == width for sequence in round.sequences)
        assert all(sequence.known == 1 for sequence in round.sequences)
        assert all(sequence.budget > 0 for sequence in round.sequences)
        drafts = round.features is Features.DRAFT
        verify = self.verify(n, width, context)
        if round.sequences[0].processor.sampling.temperature:
            verify += self.sampling(n)
        draft = self.draft(n, context) if drafts else 0.0
        self.rounds += 1
        slow = 10 if self.spikes and self.rounds % self.spikes == 0 else 1
        self.now += HOP * self.scale + slow * (verify + draft)
        results = [SequenceResult(0, 0) for _ in round.sequences]
        drafted = DraftResult([], slow * draft) if drafts else None
        return RoundResult(results, slow * verify, drafted)

    def measure(self, *, records_steps: bool = False) -> CostProfile:
        sizes = {"block_size": 8, "slots": 8, "max_seq_len": 1024, "most_verified": 16}
        info: Any = SimpleNamespace(**sizes, records_steps=records_steps)
        return measure(self, info, clock=lambda: self.now)


@pytest.mark.parametrize("spikes", [0, 11])
@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_what_rounds_take_is_found(scale: float, spikes: int) -> None:
    """Hops between the models are part of verifying; occasional other load is not."""
    machine = Machine(scale, spikes)
    found = machine.measure()
    assert found.sequences == [1, 2, 4, 8]
    assert found.widths == [1, 2, 4, 8, 16]
    assert found.contexts == [64, 1024 - 2 * 16]
    for i, context in enumerate(found.contexts):
        for j, n in enumerate(found.sequences):
            wanted = [machine.verify(n, width, context) + HOP * scale for width in found.widths]
            assert found.verify_seconds[i][j] == pytest.approx(wanted)
            assert found.draft_seconds[i][j] == pytest.approx(machine.draft(n, context))
    assert found.verify(3, 5, 512) == pytest.approx(machine.verify(3, 5, 512) + HOP * scale)
    assert found.sampling(3) == pytest.approx(machine.sampling(3))


class Caching(Machine):
    """A machine whose rounds take twice as long after one of another kind."""

    last = (0, False)

    def __call__(self, round: Round) -> RoundResult:
        kind = round.width, round.features is Features.DRAFT
        before = self.now
        result = super().__call__(round)
        if kind != self.last:
            self.now += self.now - before
        self.last = kind
        return result


def test_plain_steps_are_timed_after_plain_ones() -> None:
    """Plain decoding runs them so: timed after others they would make drafts look cheap."""
    machine = Caching(scale=30.0)  # slow, so that most rounds are timed at once
    found = machine.measure()
    plain = machine.verify(1, 1, 64) + HOP * machine.scale
    assert found.verify(1, 1, 64) == pytest.approx(plain)
    wide = machine.verify(1, 16, 64) + HOP * machine.scale
    assert found.verify(1, 16, 64) == pytest.approx(2 * wide)


class Recording(Machine):
    """A machine that compiles a round when it comes first, and records it when it comes again."""

    def __init__(self) -> None:
        super().__init__()
        self.visits: dict[tuple[object, ...], int] = {}

    def __call__(self, round: Round) -> RoundResult:
        sequence = round.sequences[0]
        kind = (
            len(round.sequences),
            round.width,
            sequence.position,
            round.features,
            sequence.processor,
        )
        self.visits[kind] = self.visits.get(kind, 0) + 1
        result = super().__call__(round)
        if self.visits[kind] > 2:
            return result
        self.now += 1.0
        drafts = result.drafts
        return result if drafts is None else replace(result, drafts=replace(drafts, seconds=1.0))


def test_compiling_and_recording_are_not_timed() -> None:
    machine = Recording()
    found = machine.measure(records_steps=True)
    assert found.sequences == [1, 2, 4, 8]
    for n in (1, 8):
        for width in (1, 16):
            wanted = machine.verify(n, width, 64) + HOP
            assert found.verify(n, width, 64) == pytest.approx(wanted)
        assert found.draft(n, 64) == pytest.approx(machine.draft(n, 64))
    assert min(machine.visits.values()) >= 2 + 3  # at least three are timed


@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0, 200.0])
def test_it_ends_in_time(scale: float) -> None:
    machine = Machine(scale)
    found = machine.measure()
    assert found.sequences[-1] == 8
    assert (found.widths[0], found.widths[-1]) == (1, 16)
    assert machine.now <= BUDGET * (1 if scale <= 1 else MAX_BUDGET)
    if scale >= 200:
        assert len(found.widths) < 8


def test_real_engines_can_be_measured(built_pair: BuildPair) -> None:
    pair = built_pair()
    target, drafter = load_engine(pair.target_engine), load_engine(pair.drafter_engine)
    found = measure(in_process(target, drafter), target.info, 0.3)
    assert (found.sequences, found.widths[-1]) == ([1, 2, 4], 16)
    assert np.min(found.verify_seconds) > 0 < np.min(found.draft_seconds)

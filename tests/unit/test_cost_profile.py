"""What rounds cost: measured on made-up and on real engines."""

import numpy as np
import pytest
from built_pairs import BuildPair

from dflash_trt.decoding import in_process
from dflash_trt.decoding.messages import RoundOutput, VerifyInput, no_drafts
from dflash_trt.decoding.speculation import CostProfile
from dflash_trt.decoding.speculation.costs import BUDGET, MAX_BUDGET, measure
from dflash_trt.engines.load import load_engine

TABLE = CostProfile(
    contexts=[64, 1088],
    rows=[1, 4],
    widths=[1, 2, 8],
    verify_seconds=[[[1.0, 2.0, 5.0], [4.0, 8.0, 20.0]], [[3.0, 4.0, 7.0], [6.0, 10.0, 22.0]]],
    draft_seconds=[[1.0, 2.0], [3.0, 4.0]],
)
HOP = 0.25e-3


class Machine:
    """Rounds of a made-up cost, on a clock of their own; follows `RunRound`."""

    def __init__(self, scale: float = 1.0, spikes: int = 0) -> None:
        self.scale, self.spikes = scale, spikes  # each so-many-th round takes ten times as long
        self.now, self.rounds = 0.0, 0

    def verify(self, n: int, width: int, context: int) -> float:
        return self.scale * (1e-3 + 1e-4 * n * width + 1e-7 * n * context + 1e-8 * width * context)

    def draft(self, n: int, context: int) -> float:
        return self.scale * (5e-4 + 1e-4 * n + 1e-7 * n * context)

    def __call__(self, x: VerifyInput) -> RoundOutput:
        n, width = x.tokens.shape
        lengths, forced, places, budgets = x.rows.T
        assert (lengths == width).all()
        assert (forced == 1).all()
        assert (budgets > 0).all()
        verify, draft = self.verify(n, width, int(places[0])), 0.0
        if x.batch[1] > 0:
            draft = self.draft(n, int(places[0]))
        self.rounds += 1
        slow = 10 if self.spikes and self.rounds % self.spikes == 0 else 1
        self.now += HOP * self.scale + slow * (verify + draft)
        none = np.zeros((n, 1, 1))
        results = np.zeros((n, 3), np.int64)
        return RoundOutput(
            results,
            none.astype(np.float32),
            none.astype(np.int64),
            slow * verify,
            *no_drafts(n)[:2],
            slow * draft,
        )

    def measure(self, slots: int = 8, max_seq_len: int = 1024, block_size: int = 8) -> CostProfile:
        return measure(self, block_size, slots, max_seq_len, clock=lambda: self.now)


# --- reading off ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "width", "context", "seconds"),
    [
        (1, 1, 64, 1.0),
        (4, 8, 1088, 22.0),
        (1, 5, 64, 3.5),
        (2, 1, 64, 2.0),
        (1, 1, 576, 2.0),
        (2, 5, 64, 3.5 + (14 - 3.5) / 3),
        (1, 10, 64, 6.0),  # beyond the last width, rows and context
        (7, 1, 64, 7.0),
        (1, 1, 2112, 5.0),
        (1, 1, 0, 1.0),  # before the first context
        (1, 1, 100, 1.0),  # of the same bucket as 64
    ],
)
def test_between_what_was_measured(n: int, width: int, context: int, seconds: float) -> None:
    for _ in range(2):  # computed, and remembered
        assert TABLE.verify(n, width, context) == pytest.approx(seconds)


def test_drafts_between_what_was_measured() -> None:
    found = [TABLE.draft(*at) for at in ((1, 64), (4, 1088), (2, 64), (4, 576), (7, 64))]
    assert found == pytest.approx([1, 4, 4 / 3, 3, 3])


def test_a_table_of_one_kind_of_round() -> None:
    one = CostProfile([0], [1], [1], [[[2.0]]], [[1.0]])
    assert (one.verify(3, 5, 700), one.draft(3, 700)) == (2.0, 1.0)


# --- measuring -----------------------------------------------------------------------------------


@pytest.mark.parametrize("spikes", [0, 11])
@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_what_rounds_take_is_found(scale: float, spikes: int) -> None:
    """Hops between the models are part of verifying; a machine that is busy now and then is not."""
    machine = Machine(scale, spikes)
    found = machine.measure()
    assert found.rows == [1, 2, 4, 8]
    assert found.widths == [1, 2, 4, 8, 16]
    short, long = found.contexts
    assert (short, long) == (64, 1024 - 2 * 16)
    for context in found.contexts:
        at = context // 64 * 64 if context == short else context
        for n in (1, 2, 4, 8):
            for width in found.widths:
                i, j, k = (
                    axis.index(x)
                    for axis, x in zip(
                        (found.contexts, found.rows, found.widths), (context, n, width), strict=True
                    )
                )
                wanted = machine.verify(n, width, at) + HOP * scale
                assert found.verify_seconds[i][j][k] == pytest.approx(wanted)
            assert found.draft_seconds[i][j] == pytest.approx(machine.draft(n, at))
    between = found.verify(3, 5, 512)
    assert between == pytest.approx(machine.verify(3, 5, 512) + HOP * scale)


@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0, 200.0])
def test_it_ends_in_time(scale: float) -> None:
    machine = Machine(scale)
    found = machine.measure()
    assert found.rows[-1] == 8
    assert (found.widths[0], found.widths[-1]) == (1, 16)
    assert machine.now <= BUDGET * (1 if scale <= 1 else MAX_BUDGET)
    if scale >= 200:
        assert len(found.widths) < 8


def test_where_a_step_takes_seconds_few_are_made() -> None:
    machine = Machine(1000.0)
    found = machine.measure()
    assert (found.contexts, found.rows, found.widths) == ([64], [1, 8], [1, 16])
    assert machine.rounds < 20


def test_a_wider_step_is_never_quicker() -> None:
    class Odd(Machine):
        def verify(self, n: int, width: int, context: int) -> float:
            return super().verify(n, width, context) * (0.5 if width == 4 else 1.0)

    found = Odd().measure()
    table = np.array(found.verify_seconds)
    for axis in range(3):
        assert (np.diff(table, axis=axis) >= 0).all()
    # the slow ones are not made slower by more than the quick ones are by
    assert found.verify(1, 2, 64) < Machine().verify(1, 2, 64) + HOP


@pytest.mark.parametrize(
    ("slots", "max_seq_len", "block_size", "rows", "widest", "contexts"),
    [
        (1, 4096, 8, [1], 16, [64, 4064]),
        (6, 160, 8, [1, 2, 4, 6], 16, [64]),
        (2, 9, 8, [1, 2], 9, [0]),
        (4, 1024, 20, [1, 2, 4], 20, [64, 984]),
    ],
)
def test_the_grid_fits_the_engine(
    slots: int, max_seq_len: int, block_size: int, rows: list[int], widest: int, contexts: list[int]
) -> None:
    found = Machine().measure(slots, max_seq_len, block_size)
    assert (found.rows, found.widths[-1], found.contexts) == (rows, widest, contexts)


def test_real_engines_can_be_measured(built_pair: BuildPair) -> None:
    pair = built_pair()
    target, drafter = load_engine(pair.target_engine), load_engine(pair.drafter_engine)
    info = drafter.info
    run = in_process(target, drafter)
    found = measure(run, info.block_size, info.slots, target.info.max_seq_len, 0.3)
    assert (found.rows, found.widths[-1]) == ([1, 2, 4], 16)
    assert np.min(found.verify_seconds) > 0 < np.min(found.draft_seconds)

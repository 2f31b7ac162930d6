"""Measure what rounds cost, before the first request."""

import time
from collections.abc import Callable
from itertools import product

import numpy as np
import numpy.typing as npt

from dflash_trt.decoding.messages import RunRound, verify_input
from dflash_trt.engines import EngineInfo
from dflash_trt.speculation.profile import CostProfile

CANDIDATES = 8  # requested for each draft while measuring
SHORT = 64  # the short context, in tokens
BUDGET = 2.0  # seconds to measure; MAX_BUDGET times as many where rounds are slow
MAX_BUDGET = 8
MIN_PASSES = 3
MAX_PASSES = 16

Round = tuple[int, int, int]  # context, rows, width; width 0: only the drafter is timed


def measure(
    run_round: RunRound,
    info: EngineInfo,
    budget_seconds: float = BUDGET,
    clock: Callable[[], float] = time.perf_counter,
) -> CostProfile:
    """Time rounds on idle slots of the target that `info` describes.

    Call while no sequence is active: it writes to slots 0 .. slots-1. Takes `budget_seconds`, up to
    MAX_BUDGET times as long with slow rounds; longer only if one step of all slots takes seconds.
    """
    start, max_seconds = clock(), MAX_BUDGET * budget_seconds
    block_size, slots = info.block_size, info.slots
    max_width = min(info.most_verified, info.max_seq_len)
    long = info.max_seq_len - 2 * max_width  # leaves room for a round and its drafts
    contexts = [SHORT, long] if long > 2 * SHORT else [max(min(SHORT, long), 0)]

    def visit(context: int, n: int, width: int) -> float:
        """Run one greedy round; return the seconds of its target or drafter."""
        verified = width or min(4, block_size)  # a typical number of features to inject
        rows = [[verified, 1, context, 2 * block_size, (verified - 1) // 2]] * n
        batch = [0, 0 if width else block_size - 1, CANDIDATES]
        x = verify_input(batch, rows, [[0] * verified] * n)
        began = clock()
        output = run_round(x)
        return clock() - began - output.draft_seconds if width else output.draft_seconds

    visit(contexts[0], 1, 1)  # load the weights into memory
    plain, largest = visit(contexts[0], 1, 1), visit(contexts[-1], slots, max_width)
    if largest < budget_seconds / 10:  # the first run of a shape binds buffers
        largest = visit(contexts[-1], slots, max_width)
    few_rows, few_widths = sorted({1, slots}), sorted({1, max_width})
    for grid in (
        (contexts, _doubling(slots), _doubling(max_width)),
        (contexts[:1], few_rows, _doubling(max_width)),
        (contexts[:1], few_rows, few_widths),
    ):
        kinds = list(product(grid[0], grid[1], (*grid[2], 0)))
        shares = (n * (width or 2 * block_size) / (slots * max_width) for _, n, width in kinds)
        a_pass = sum(plain + share * max(largest - plain, 0.0) for share in shares)
        if MIN_PASSES * a_pass <= max_seconds:
            break
    # with a small engine the first round after another kind is slower
    warm_ups = 1 if 3 * 4 * a_pass <= budget_seconds else 0
    seconds: dict[Round, list[float]] = {kind: [] for kind in kinds}
    began = clock()
    for passed in range(1, MAX_PASSES + 1):
        # every pass visits all kinds, so that noise of the machine affects all
        for kind in kinds:
            # nor should features left by earlier rounds count
            for _ in range(warm_ups if kind[2] else 1):
                visit(*kind)
            seconds[kind] += [visit(*kind) for _ in range(1 + warm_ups)]
        a_pass = (clock() - began) / passed
        if clock() - start + a_pass > (budget_seconds if passed >= MIN_PASSES else max_seconds):
            break
    # the lower quartile, because other load only adds time: between measurements on a busy machine
    # it varied half as much as the median
    typical = np.array([np.quantile(seconds[kind], 0.25) for kind in kinds])
    table = _rising(typical.reshape([len(axis) for axis in grid[:2]] + [-1]))
    return CostProfile(*grid, table[..., :-1].tolist(), table[..., -1].tolist())


def _doubling(last: int) -> list[int]:
    return [n for n in (1 << i for i in range(last.bit_length())) if n < last] + [last]


def _rising(table: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Make `[context, rows, widths and drafter]` monotonic: larger never takes less time.

    Exceptions are noise, and the policy would prefer a wide round that looks free. Uses the mean of
    the running maximum and the reversed running minimum: a maximum alone would spread one slow
    outlier over everything larger.
    """
    for axis, part in ((0, np.s_[:]), (1, np.s_[:]), (2, np.s_[:-1])):
        rising = table[..., part]
        lowest = np.flip(np.minimum.accumulate(np.flip(rising, axis), axis), axis)
        table[..., part] = (np.maximum.accumulate(rising, axis) + lowest) / 2
    return table

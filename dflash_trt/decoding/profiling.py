"""Measure what rounds cost, before the first request."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from dflash_trt.decoding.arrays import Float64
from dflash_trt.decoding.logits_processor import PLAIN_GREEDY, LogitsProcessor
from dflash_trt.decoding.messages import Round, RoundSequence, RunRound
from dflash_trt.decoding.sampling import SamplingParams
from dflash_trt.engines import EngineInfo, few_sizes
from dflash_trt.speculation import Features
from dflash_trt.speculation.profile import CostProfile

CANDIDATES = 8  # requested for each draft while measuring
SHORT = 64  # the short context, in tokens
BUDGET = 2.0  # seconds to measure; MAX_BUDGET times as many where rounds are slow
MAX_BUDGET = 8
MIN_PASSES = 3
MAX_PASSES = 16
INJECTED = 4  # features of each sequence to inject when the drafter is timed: a typical number
QUANTILE = 0.25
USUAL_SAMPLING = LogitsProcessor(SamplingParams(temperature=1.0, top_p=0.95), 0, ())


@dataclass(frozen=True)
class Point:
    """A round to time; width None: only its drafter."""

    context: int  # tokens before the round
    sequences: int
    width: int | None
    is_sampled: bool = False


@dataclass(frozen=True)
class Grid:
    contexts: list[int]
    sequences: list[int]
    widths: list[int]

    def points(self) -> list[Point]:
        axes = self.contexts, self.sequences, (*self.widths, None)
        greedy = [Point(context, n, width) for context, n, width in product(*axes)]
        return [*greedy, *self.sampled_points()]

    def sampled_points(self) -> list[Point]:
        """Return plain steps of the shortest context: sampling takes as long after any other."""
        return [Point(self.contexts[0], n, 1, is_sampled=True) for n in self.sequences]


def measure(
    run_round: RunRound,
    info: EngineInfo,
    budget_seconds: float = BUDGET,
    clock: Callable[[], float] = time.perf_counter,
) -> CostProfile:
    """Time rounds on idle slots of the target that `info` describes.

    Call while no sequence is active: it writes to slots 0 .. slots-1. Takes `budget_seconds`, up to
    MAX_BUDGET times as long with slow rounds; longer only if one step of all slots takes seconds,
    or where steps are compiled and recorded first.
    """
    start = clock()
    max_seconds = MAX_BUDGET * budget_seconds

    def visit(point: Point) -> float:
        return _time_round(run_round, point, info.block_size, clock)

    grids = [*_grids(info)]
    smallest = Point(grids[0].contexts[0], 1, 1)
    largest = Point(grids[0].contexts[-1], grids[0].sequences[-1], grids[0].widths[-1])
    first_visits = 2 if info.records_steps else 0

    def prepare(points: Sequence[Point]) -> None:
        for point in points:
            for _ in range(first_visits):
                visit(point)

    prepare([smallest, largest])
    visit(smallest)  # load the weights into memory
    plain_seconds = visit(smallest)
    largest_seconds = visit(largest)
    if largest_seconds < budget_seconds / 10:  # the first run of a shape binds buffers
        largest_seconds = visit(largest)
    for grid in grids:
        pass_seconds = _estimate_pass(grid, info, plain_seconds, largest_seconds)
        if MIN_PASSES * pass_seconds <= max_seconds:
            break
    points = grid.points()
    prepare(points)
    # with a small engine the first round after another kind is slower
    warm_ups = 1 if 3 * 4 * pass_seconds <= budget_seconds else 0
    seconds: dict[Point, list[float]] = {point: [] for point in points}
    if info.records_steps:
        start = clock()
    passes_start = clock()
    for passes in range(1, MAX_PASSES + 1):
        # every pass visits all points, so that noise of the machine affects all
        for point in points:
            for _ in range(max(warm_ups, _least_warm_ups(point))):
                visit(point)
            seconds[point] += [visit(point) for _ in range(1 + warm_ups)]
        pass_seconds = (clock() - passes_start) / passes
        limit = budget_seconds if passes >= MIN_PASSES else max_seconds
        if clock() - start + pass_seconds > limit:
            break
    return _profile(grid, seconds, pads_widths=info.records_steps)


def _least_warm_ups(point: Point) -> int:
    """Return how many rounds of this kind must run before one is timed.

    Plain steps follow each other: after a wide round one takes up to twice as long, because the
    weights have left the CPU's cache, and drafts would look cheap beside it. The drafter's time
    should not count features left by earlier rounds.
    """
    follows_its_kind = point.width is None or point.width == 1
    return 1 if follows_its_kind else 0


def _grids(info: EngineInfo) -> Iterator[Grid]:
    """Yield grids of points to time, the finest first."""
    max_width = min(info.most_verified, info.max_seq_len)
    long = info.max_seq_len - 2 * max_width  # leaves room for a round and its drafts
    contexts = [SHORT, long] if long > 2 * SHORT else [max(min(SHORT, long), 0)]
    few = sorted({1, info.slots})
    widths = few_sizes(max_width)
    yield Grid(contexts, few_sizes(info.slots), widths)
    yield Grid(contexts[:1], few, widths)
    yield Grid(contexts[:1], few, sorted({1, max_width}))


def _time_round(
    run_round: RunRound, point: Point, block_size: int, clock: Callable[[], float]
) -> float:
    """Run one round; return the seconds of its target or drafter."""
    times_drafter = point.width is None
    width = point.width or min(INJECTED, block_size)
    sequence = RoundSequence(
        [0] * width,
        known=1,
        position=point.context,
        budget=2 * block_size,
        replayed=(width - 1) // 2,
        processor=USUAL_SAMPLING if point.is_sampled else PLAIN_GREEDY,
    )
    round = Round(
        0,
        [sequence] * point.sequences,
        Features.DRAFT if times_drafter else Features.KEEP,
        draft_tokens=block_size - 1 if times_drafter else 0,
        candidates=CANDIDATES,
    )
    start = clock()
    result = run_round(round)
    if times_drafter:
        return result.draft_seconds
    return clock() - start - result.draft_seconds


def _estimate_pass(
    grid: Grid, info: EngineInfo, plain_seconds: float, largest_seconds: float
) -> float:
    """Return the seconds of a pass over all points, from those of the smallest and largest."""
    most_tokens = info.slots * min(info.most_verified, info.max_seq_len)
    seconds = 0.0
    for point in grid.points():
        share = point.sequences * (point.width or 2 * info.block_size) / most_tokens
        seconds += plain_seconds + share * max(largest_seconds - plain_seconds, 0.0)
    return seconds


def _profile(grid: Grid, seconds: dict[Point, list[float]], *, pads_widths: bool) -> CostProfile:
    """Return the profile of a grid; seconds: of each visit of each point."""
    # the lower quartile, because other load only adds time: between measurements on a busy machine
    # it varied half as much as the median
    typical = {point: float(np.quantile(visits, QUANTILE)) for point, visits in seconds.items()}
    greedy = np.array([typical[point] for point in grid.points() if not point.is_sampled])
    table = _rising(greedy.reshape(len(grid.contexts), len(grid.sequences), -1))
    sampling = [
        max(typical[point] - typical[replace(point, is_sampled=False)], 0.0)
        for point in grid.sampled_points()
    ]
    verify_seconds = table[..., :-1].tolist()
    draft_seconds = table[..., -1].tolist()
    return CostProfile(
        grid.contexts,
        grid.sequences,
        grid.widths,
        verify_seconds,
        draft_seconds,
        sampling,
        pads_widths=pads_widths,
    )


def _rising(table: Float64) -> Float64:
    """Make `[context, sequences, widths and drafter]` monotonic: larger never takes less time.

    Exceptions are noise, and the policy would prefer a wide round that looks free. Uses the mean of
    the running maximum and the reversed running minimum: a maximum alone would spread one slow
    outlier over everything larger.
    """
    for axis, part in ((0, np.s_[:]), (1, np.s_[:]), (2, np.s_[:-1])):
        rising = table[..., part]
        lowest = np.flip(np.minimum.accumulate(np.flip(rising, axis), axis), axis)
        table[..., part] = (np.maximum.accumulate(rising, axis) + lowest) / 2
    return table

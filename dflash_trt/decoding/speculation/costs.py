"""Costs of rounds: measured by width, batch and length, and corrected while serving."""

import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from statistics import median
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dflash_trt.decoding.messages import RunRound, verify_input
from dflash_trt.engines import EngineInfo

NEAR = 256  # width of the context buckets, tokens
REFRESH = 8  # rounds between recalculations
TIMED = 3  # samples needed before a measured ratio is used
PROFILED = 3  # samples that the profile counts for against cheaper ones
RECENT = 24  # samples kept
BESIDE = 16  # largest distance in rounds of two steps that are compared
WINDOW = 512  # rounds after which a sample expires
STALE = 128  # rounds after which a plain step is timed again

Costs = tuple[list[float], float]


class StepCosts(Protocol):
    """Seconds of steps; `CostProfile` is one."""

    def verify(self, n: int, width: int, context: int) -> float: ...
    def draft(self, n: int, context: int) -> float: ...


class CostModel:
    """Cost model in units of plain steps, which verify one token of each row.

    For each kind of step and batch-size bucket, the profile is corrected by a windowed median of
    measured over predicted time, relative to a nearby plain step: the profile does not see caches
    emptied by other steps. Only nearby steps are compared, because other load on the machine
    changes.
    """

    def __init__(self, profile: StepCosts, max_drafts: int) -> None:
        self._profile = profile
        self._max_drafts = max_drafts  # per row in a round
        self._ratios = defaultdict[tuple[int, str], _Times](lambda: deque(maxlen=RECENT))
        self._unpaired = defaultdict[tuple[int, str], _Times](lambda: deque(maxlen=TIMED))
        self._corrected: dict[tuple[int, int], Costs] = {}
        self._now = 0  # timed rounds

    def add(
        self, n: int, width: int, context: int, verify: float, draft: float, streak: int
    ) -> None:
        """Add the seconds of a round: n rows of `width` drafts each, and the drafter after it."""
        near, at = _bucket_middle(context), n.bit_length()
        self._now += 1
        if not self._now % REFRESH:
            self._corrected.clear()
        ratio = verify / self._profile.verify(n, 1 + width, near)
        if width and streak != 1:
            self._unpaired[at, "verify"].append((self._now, ratio))
        if draft and streak:  # the drafter took in features of one round only
            took = draft / self._profile.draft(n, near)
            self._unpaired[at, "draft"].append((self._now, took))
        if not width and not streak:
            self._ratios[at, "plain"].append((self._now, ratio))
            for kind in ("verify", "draft"):
                times = self._unpaired[at, kind]
                beside = [each for when, each in times if self._now - when <= BESIDE]
                if beside:
                    self._ratios[at, kind].append((self._now, median(beside) / ratio))
                times.clear()

    def costs(self, n: int, context: int) -> Costs:
        """Return the costs of a step with 0, 1, .. drafts per row, and of the drafter."""
        near = _bucket_middle(context)
        if (n, near) not in self._corrected:
            plain = self._profile.verify(n, 1, near)
            more = self._ratio(n, "verify") / plain
            widths = range(2, self._max_drafts + 2)
            steps = [max(self._profile.verify(n, w, near) * more, 1.0) for w in widths]
            draft = self._profile.draft(n, near) * self._ratio(n, "draft") / plain
            self._corrected[n, near] = [1.0, *steps], draft
        return self._corrected[n, near]

    def plain_seconds(self, n: int, context: int) -> float:
        return self._profile.verify(n, 1, _bucket_middle(context)) * self._ratio(n, "plain")

    def needs_plain(self, n: int) -> bool:
        """Return whether steps with drafts wait for a recent plain step to compare with."""
        at = n.bit_length()
        if len(self._unpaired[at, "verify"]) < TIMED:
            return False
        known = self._ratios[at, "verify"]
        return len(known) < TIMED or self._now - known[-1][0] > STALE

    def _ratio(self, n: int, kind: str) -> float:
        """Return the median ratio, 1 with too few samples; a median ignores some delays.

        A few slow plain steps must not hide a cost, so the profile counts against lower ratios.
        """
        ratios = self._ratios[n.bit_length(), kind]
        while ratios and self._now - ratios[0][0] > WINDOW:
            ratios.popleft()  # expired samples let an expensive step be tried again
        if len(ratios) < TIMED:
            return 1.0
        found = [ratio for _, ratio in ratios]
        return max(median(found), median([*found, *[1.0] * PROFILED]))


_Times = deque[tuple[int, float]]  # (round, ratio)


def _bucket_middle(context: int) -> int:
    return context // NEAR * NEAR + NEAR // 2


CANDIDATES = 8  # requested for each draft while measuring
SHORT, BUCKET = 64, 64  # the short context, and width of a lookup bucket, in tokens
BUDGET = 2.0  # seconds to measure; MAX_BUDGET times as many where rounds are slow
MAX_BUDGET, MIN_PASSES, MAX_PASSES = 8, 3, 16

Round = tuple[int, int, int]  # context, rows, width; width 0: only the drafter is timed


@dataclass(frozen=True)
class CostProfile:
    """Seconds of `verify` and of `draft`; each axis rises."""

    contexts: list[int]  # cached tokens per row
    rows: list[int]  # sequences in the batch
    widths: list[int]  # tokens verified per row; 1: plain decoding
    verify_seconds: list[list[list[float]]]  # [context][rows][width]; includes ensemble overhead
    draft_seconds: list[list[float]]  # [context][rows]
    _found: dict[Round, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def verify(self, n: int, width: int, context: int) -> float:
        return self._read(self.verify_seconds, n, width, context)

    def draft(self, n: int, context: int) -> float:
        return self._read(self.draft_seconds, n, 0, context)

    def _read(self, table: Any, n: int, width: int, context: int) -> float:
        """Interpolate linearly, extrapolate above the last point, clamp below the first."""
        key = (n, width, context // BUCKET)
        if key not in self._found:
            found = np.asarray(table, np.float64)
            points = ((self.contexts, key[2] * BUCKET), (self.rows, n), (self.widths, width))
            for axis, at in points if width else points[:2]:  # drafts have no width
                if len(axis) == 1:
                    found = found[0]
                    continue
                i = min(max(int(np.searchsorted(axis, at, "right")) - 1, 0), len(axis) - 2)
                share = max((at - axis[i]) / (axis[i + 1] - axis[i]), 0.0)
                found = found[i] + share * (found[i + 1] - found[i])
            self._found[key] = float(found)
        return self._found[key]


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

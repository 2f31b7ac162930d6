"""Costs of rounds in plain steps: a measured profile, corrected while serving."""

from collections import defaultdict, deque
from statistics import mean, median
from typing import NamedTuple, Protocol

NEAR = 256  # width of the context buckets, tokens
REFRESH = 8  # rounds between recalculations
TIMED = 3  # samples needed before a measured ratio is used
PROFILED = 3  # weight of the profile, in samples, when measurements look cheaper
RECENT = 24  # samples kept
BESIDE = 16  # largest distance in rounds of two steps that are compared
WINDOW = 512  # rounds after which a sample expires
STALE = 128  # rounds after which a plain step is timed again
MAX_OVERRUN = 2.0  # limit of one round's measured over expected cost; more is noise

Times = deque[tuple[int, float]]  # round and ratio


class RoundCosts(NamedTuple):
    """Costs in plain steps."""

    steps: list[float]  # of a step with 0, 1, .. drafts per row
    draft: float  # of the drafter
    plain_seconds: float  # of a plain step


class StepCosts(Protocol):
    """Seconds of steps; `CostProfile` is one, tests have others."""

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
        self._ratios = defaultdict[tuple[int, str], Times](lambda: deque(maxlen=RECENT))
        self._unpaired = defaultdict[tuple[int, str], Times](lambda: deque(maxlen=TIMED))
        self._overruns = defaultdict[tuple[int, str], deque[float]](lambda: deque(maxlen=RECENT))
        self._corrected: dict[tuple[int, int], RoundCosts] = {}
        self._now = 0  # timed rounds

    def add(
        self, n: int, draft_len: int, context: int, verify: float, draft: float, streak: int
    ) -> None:
        """Add the seconds of a round: n rows of `draft_len` drafts each, and the drafter after it.

        streak: rounds in a row, before this one, that ended with the drafter.
        """
        near = _bucket_middle(context)
        batch = n.bit_length()
        self._now += 1
        if self._now % REFRESH == 0:
            self._corrected.clear()
        ratio = verify / self._profile.verify(n, 1 + draft_len, near)
        drafter_has_just_begun = streak == 1  # with the features of many rounds
        if draft_len and not drafter_has_just_begun:
            self._unpaired[batch, "verify"].append((self._now, ratio))
        drafter_goes_on = draft > 0 and streak > 0  # with the features of one round
        if drafter_goes_on:
            draft_ratio = draft / self._profile.draft(n, near)
            self._unpaired[batch, "draft"].append((self._now, draft_ratio))
        is_plain = draft_len == 0 and streak == 0
        if is_plain:
            self._add_plain(batch, ratio)
        costs = self.costs(n, context)
        if draft_len and draft:
            expected = (costs.steps[draft_len] + costs.draft) * costs.plain_seconds
            self._add_overrun(batch, "drafts", (verify + draft) / expected)
        elif is_plain and not draft:
            self._add_overrun(batch, "plain", verify / costs.plain_seconds)

    def _add_plain(self, batch: int, ratio: float) -> None:
        """Add the ratio of a plain step, and of nearby steps to it."""
        self._ratios[batch, "plain"].append((self._now, ratio))
        for kind in ("verify", "draft"):
            times = self._unpaired[batch, kind]
            nearby = [value for when, value in times if self._now - when <= BESIDE]
            if nearby:
                self._ratios[batch, kind].append((self._now, median(nearby) / ratio))
            times.clear()

    def _add_overrun(self, batch: int, kind: str, ratio: float) -> None:
        """Add the seconds of a whole round over those that were expected."""
        self._overruns[batch, kind].append(min(ratio, MAX_OVERRUN))

    def overrun(self, n: int) -> float:
        """Return how much more rounds with drafts cost than their parts, at least 1.

        Parts are medians. What slows down only some rounds shows in the mean; what slows down plain
        rounds as much does not count.
        """
        drafts = self._overruns[n.bit_length(), "drafts"]
        plain = self._overruns[n.bit_length(), "plain"]
        if min(len(drafts), len(plain)) < TIMED:
            return 1.0
        return max(mean(drafts) / mean(plain), 1.0)

    def costs(self, n: int, context: int) -> RoundCosts:
        near = _bucket_middle(context)
        if (n, near) not in self._corrected:
            plain = self._profile.verify(n, 1, near)
            more = self._ratio(n, "verify") / plain
            widths = range(2, self._max_drafts + 2)
            steps = [max(self._profile.verify(n, width, near) * more, 1.0) for width in widths]
            draft = self._profile.draft(n, near) * self._ratio(n, "draft") / plain
            seconds = plain * self._ratio(n, "plain")
            self._corrected[n, near] = RoundCosts([1.0, *steps], draft, seconds)
        return self._corrected[n, near]

    def needs_plain(self, n: int) -> bool:
        """Return whether steps with drafts wait for a recent plain step to compare with."""
        batch = n.bit_length()
        if len(self._unpaired[batch, "verify"]) < TIMED:
            return False
        ratios = self._ratios[batch, "verify"]
        if len(ratios) < TIMED:
            return True
        last, _ = ratios[-1]
        return self._now - last > STALE

    def _ratio(self, n: int, kind: str) -> float:
        """Return the median ratio, 1 with too few samples; a median ignores some delays.

        A few slow plain steps must not hide a cost, so the profile counts against lower ratios.
        """
        ratios = self._ratios[n.bit_length(), kind]
        while ratios and self._now - ratios[0][0] > WINDOW:
            ratios.popleft()  # expired samples let an expensive step be tried again
        if len(ratios) < TIMED:
            return 1.0
        values = [ratio for _, ratio in ratios]
        return max(median(values), median([*values, *[1.0] * PROFILED]))


def _bucket_middle(context: int) -> int:
    return context // NEAR * NEAR + NEAR // 2

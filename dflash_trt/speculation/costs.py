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


class Bucket(NamedTuple):
    """Rounds whose costs and gains are learned together."""

    batch: int  # bits of the number of sequences
    sampled: bool  # whether a sequence is

    @classmethod
    def of(cls, n: int, sampled: bool) -> "Bucket":
        return cls(n.bit_length(), sampled)


class RoundCosts(NamedTuple):
    """Costs in plain steps."""

    steps: list[float]  # of a step with 0, 1, .. drafts per sequence
    draft: float  # of the drafter
    plain_seconds: float  # of a plain step


class StepCosts(Protocol):
    """Seconds of steps; `CostProfile` is one, tests have others."""

    def verify(self, n: int, width: int, context: int) -> float: ...
    def sampling(self, n: int) -> float: ...  # what it adds to `verify`
    def draft(self, n: int, context: int) -> float: ...


class CostModel:
    """Cost model in units of plain steps, which verify one token of each sequence.

    For each kind of step and bucket, the profile is corrected by a windowed median of
    measured over predicted time, relative to a nearby plain step: the profile does not see caches
    emptied by other steps. Only nearby steps are compared, because other load on the machine
    changes.
    """

    def __init__(self, profile: StepCosts, max_drafts: int) -> None:
        self._profile = profile
        self._max_drafts = max_drafts  # per sequence in a round
        self._ratios = defaultdict[tuple[Bucket, str], Times](lambda: deque(maxlen=RECENT))
        self._unpaired = defaultdict[tuple[Bucket, str], Times](lambda: deque(maxlen=TIMED))
        self._overruns = defaultdict[tuple[Bucket, str], deque[float]](lambda: deque(maxlen=RECENT))
        self._corrected: dict[tuple[int, bool, int], RoundCosts] = {}
        self._now = 0  # timed rounds

    def add(
        self,
        n: int,
        draft_len: int,
        context: int,
        verify: float,
        draft: float,
        streak: int,
        *,
        sampled: bool = False,
    ) -> None:
        """Add the seconds of a round, n sequences of `draft_len` drafts each, and the drafter's.

        streak: rounds in a row, before this one, that ended with the drafter.
        """
        near = _bucket_middle(context)
        bucket = Bucket.of(n, sampled)
        self._now += 1
        if self._now % REFRESH == 0:
            self._corrected.clear()
        ratio = verify / self._profiled(n, 1 + draft_len, near, sampled)
        drafter_has_just_begun = streak == 1  # with the features of many rounds
        if draft_len and not drafter_has_just_begun:
            self._unpaired[bucket, "verify"].append((self._now, ratio))
        drafter_goes_on = draft > 0 and streak > 0  # with the features of one round
        if drafter_goes_on:
            draft_ratio = draft / self._profile.draft(n, near)
            self._unpaired[bucket, "draft"].append((self._now, draft_ratio))
        is_plain = draft_len == 0 and streak == 0
        if is_plain:
            self._add_plain(bucket, ratio)
        costs = self.costs(n, context, sampled)
        if draft_len and draft:
            expected = (costs.steps[draft_len] + costs.draft) * costs.plain_seconds
            self._add_overrun(bucket, "drafts", (verify + draft) / expected)
        elif is_plain and not draft:
            self._add_overrun(bucket, "plain", verify / costs.plain_seconds)

    def _profiled(self, n: int, width: int, context: int, sampled: bool) -> float:
        seconds = self._profile.verify(n, width, context)
        return seconds + self._profile.sampling(n) if sampled else seconds

    def _add_plain(self, bucket: Bucket, ratio: float) -> None:
        """Add the ratio of a plain step, and of nearby steps to it."""
        self._ratios[bucket, "plain"].append((self._now, ratio))
        for kind in ("verify", "draft"):
            times = self._unpaired[bucket, kind]
            nearby = [value for when, value in times if self._now - when <= BESIDE]
            if nearby:
                self._ratios[bucket, kind].append((self._now, median(nearby) / ratio))
            times.clear()

    def _add_overrun(self, bucket: Bucket, kind: str, ratio: float) -> None:
        """Add the seconds of a whole round over those that were expected."""
        self._overruns[bucket, kind].append(min(ratio, MAX_OVERRUN))

    def overrun(self, n: int, sampled: bool = False) -> float:
        """Return how much more rounds with drafts cost than their parts, at least 1.

        Parts are medians. What slows down only some rounds shows in the mean; what slows down plain
        rounds as much does not count.
        """
        bucket = Bucket.of(n, sampled)
        drafts = self._overruns[bucket, "drafts"]
        plain = self._overruns[bucket, "plain"]
        if min(len(drafts), len(plain)) < TIMED:
            return 1.0
        return max(mean(drafts) / mean(plain), 1.0)

    def costs(self, n: int, context: int, sampled: bool = False) -> RoundCosts:
        near = _bucket_middle(context)
        key = n, sampled, near
        if key not in self._corrected:
            bucket = Bucket.of(n, sampled)
            plain = self._profiled(n, 1, near, sampled)
            more = self._ratio(bucket, "verify") / plain
            widths = range(2, self._max_drafts + 2)
            steps = [max(self._profiled(n, width, near, sampled) * more, 1.0) for width in widths]
            draft = self._profile.draft(n, near) * self._ratio(bucket, "draft") / plain
            seconds = plain * self._ratio(bucket, "plain")
            self._corrected[key] = RoundCosts([1.0, *steps], draft, seconds)
        return self._corrected[key]

    def needs_plain(self, n: int, sampled: bool = False) -> bool:
        """Return whether steps with drafts wait for a recent plain step to compare with."""
        bucket = Bucket.of(n, sampled)
        if len(self._unpaired[bucket, "verify"]) < TIMED:
            return False
        ratios = self._ratios[bucket, "verify"]
        if len(ratios) < TIMED:
            return True
        last, _ = ratios[-1]
        return self._now - last > STALE

    def _ratio(self, bucket: Bucket, kind: str) -> float:
        """Return the median ratio, 1 with too few samples; a median ignores some delays.

        A few slow plain steps must not hide a cost, so the profile counts against lower ratios.
        """
        ratios = self._ratios[bucket, kind]
        while ratios and self._now - ratios[0][0] > WINDOW:
            ratios.popleft()  # expired samples let an expensive step be tried again
        if len(ratios) < TIMED:
            return 1.0
        values = [ratio for _, ratio in ratios]
        return max(median(values), median([*values, *[1.0] * PROFILED]))


def _bucket_middle(context: int) -> int:
    return context // NEAR * NEAR + NEAR // 2

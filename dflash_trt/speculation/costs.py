"""Costs of rounds in plain steps: a measured profile, corrected while serving."""

from collections import defaultdict, deque
from statistics import median
from typing import Protocol

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

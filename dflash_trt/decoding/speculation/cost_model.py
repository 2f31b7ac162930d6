"""What steps cost now: the profile of this machine, corrected by what rounds are found to take."""

from collections import defaultdict, deque
from statistics import median
from typing import Protocol

NEAR = 256  # tokens of context that steps cost about the same for
REFRESH = 8  # rounds after which costs are corrected anew
TIMED = 3  # times before what was measured is trusted
RECENT = 24  # times that count
BESIDE = 16  # rounds that two steps may lie apart to be compared
WINDOW = 512  # rounds after which a time counts no more
STALE = 128  # rounds after which a plain step is timed again
CHOICE_SECONDS = 2e-5  # what choosing for a row takes in Python, before it was timed

Costs = tuple[list[float], float]


class StepCosts(Protocol):
    """Seconds of steps: `cost_profile.CostProfile`."""

    def verify(self, n: int, width: int, context: int) -> float: ...
    def draft(self, n: int, context: int) -> float: ...


class CostModel:
    """In plain steps: the time of a step that verifies one token of each row.

    A windowed median for each kind of step and batch-size bucket, of measured over predicted time
    against that of a plain step beside it: caches that other steps have emptied are not in the
    profile. Times of different moments are not compared, since other work on the machine comes and
    goes.
    """

    def __init__(self, profile: StepCosts, max_drafts: int) -> None:
        """max_drafts: of a row in a round."""
        self._profile = profile
        self._max_drafts = max_drafts
        self._ratios = defaultdict[tuple[int, str], _Times](lambda: deque(maxlen=RECENT))
        self._unpaired = defaultdict[tuple[int, str], _Times](lambda: deque(maxlen=TIMED))
        self._corrected: dict[tuple[int, int], Costs] = {}
        self._now = 0  # rounds that were timed

    def add(
        self, n: int, width: int, context: int, verify: float, draft: float, streak: int
    ) -> None:
        """Seconds of a round of n rows with `width` drafts each, and of the drafter after it.

        streak: rounds in a row before it after which the drafter ran. Steps that change places with
        the drafter take longer: those with drafts are timed once it runs all the time, plain ones
        where it does not.
        """
        near, at = _near(context), n.bit_length()
        self._now += 1
        if not self._now % REFRESH:
            self._corrected.clear()
        ratio = verify / self._profile.verify(n, 1 + width, near)
        if width and streak != 1:
            self._unpaired[at, "verify"].append((self._now, ratio))
        if draft and streak:  # otherwise it had features of more than a round to take in
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

    def add_choice(self, n: int, seconds: float) -> None:
        """Of choosing for n rows."""
        ratios = self._ratios[n.bit_length(), "choice"]
        ratios.append((self._now, seconds / (n * CHOICE_SECONDS)))

    def costs(self, n: int, context: int) -> Costs:
        """Of a step with 0, 1, .. drafts of each row, and of the drafter."""
        near = _near(context)
        if (n, near) not in self._corrected:
            plain = self._profile.verify(n, 1, near)
            more = self._ratio(n, "verify") / plain
            widths = range(2, self._max_drafts + 2)
            steps = [max(self._profile.verify(n, w, near) * more, 1.0) for w in widths]
            draft = self._profile.draft(n, near) * self._ratio(n, "draft") / plain
            self._corrected[n, near] = [1.0, *steps], draft
        return self._corrected[n, near]

    def choice(self, n: int, context: int) -> float:
        """Of choosing for n rows."""
        return n * CHOICE_SECONDS * self._ratio(n, "choice") / self.plain_seconds(n, context)

    def plain_seconds(self, n: int, context: int) -> float:
        """Of a plain step."""
        return self._profile.verify(n, 1, _near(context)) * self._ratio(n, "plain")

    def needs_plain(self, n: int) -> bool:
        """Whether there are steps with drafts to be compared, and no plain one of late."""
        at = n.bit_length()
        if len(self._unpaired[at, "verify"]) < TIMED:
            return False
        known = self._ratios[at, "verify"]
        return len(known) < TIMED or self._now - known[-1][0] > STALE

    def _ratio(self, n: int, kind: str) -> float:
        """The median: what held up a single step says nothing."""
        ratios = self._ratios[n.bit_length(), kind]
        while ratios and self._now - ratios[0][0] > WINDOW:
            ratios.popleft()  # what seemed expensive once is tried again
        return median(ratio for _, ratio in ratios) if len(ratios) >= TIMED else 1.0


_Times = deque[tuple[int, float]]  # by round


def _near(context: int) -> int:
    """The middle of the contexts that steps cost about the same for."""
    return context // NEAR * NEAR + NEAR // 2

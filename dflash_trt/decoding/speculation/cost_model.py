"""What steps cost now: the profile of this machine, corrected by what rounds are found to take."""

from collections import defaultdict, deque
from statistics import median
from typing import Protocol

NEAR = 256  # tokens of context that steps cost about the same for
REFRESH = 8  # rounds after which costs are corrected anew
TIMED = 3  # steps of a kind before their time is trusted
RECENT = 24  # steps of a kind that count
WINDOW = 512  # rounds after which a step's time counts no more
STALE = 128  # rounds after which a plain step is timed again
CHOICE_SECONDS = 2e-5  # what choosing for a row takes in Python, before it was timed

Costs = tuple[list[float], float]


class StepCosts(Protocol):
    """Seconds of steps: `cost_profile.CostProfile`."""

    def verify(self, n: int, width: int, context: int) -> float: ...
    def draft(self, n: int, context: int) -> float: ...


class CostModel:
    """In plain steps: the time of a step that verifies one token of each row.

    A windowed median of measured over predicted time for each kind of step and batch-size bucket:
    caches that other steps have emptied, and other work on the machine, are not in the profile.
    """

    def __init__(self, profile: StepCosts, max_drafts: int) -> None:
        """max_drafts: of a row in a round."""
        self._profile = profile
        self._max_drafts = max_drafts
        self._ratios: defaultdict[tuple[int, str], deque[tuple[int, float]]] = defaultdict(
            lambda: deque(maxlen=RECENT)
        )
        self._corrected: dict[tuple[int, int], Costs] = {}
        self._now = 0  # rounds that were timed

    def add(
        self, n: int, width: int, context: int, verify: float, draft: float, streak: int
    ) -> None:
        """Seconds of a round of n rows with `width` drafts each, and of the drafter after it.

        streak: rounds in a row before it after which the drafter ran. What changes places with the
        drafter is timed once that runs all the time, plain steps only where it does not.
        """
        near = _near(context)
        self._now += 1
        if not self._now % REFRESH:
            self._corrected.clear()
        if (streak != 1) if width else not streak:
            predicted = self._profile.verify(n, 1 + width, near)
            self._add(n, "verify" if width else "plain", verify / predicted)
        if draft and streak:  # otherwise it had features of more than a round to take in
            self._add(n, "draft", draft / self._profile.draft(n, near))

    def add_choice(self, n: int, seconds: float) -> None:
        """Of choosing for n rows."""
        self._add(n, "choice", seconds / (n * CHOICE_SECONDS))

    def costs(self, n: int, context: int) -> Costs:
        """Of a step with 0, 1, .. drafts of each row, and of the drafter."""
        near = _near(context)
        if (n, near) not in self._corrected:
            plain = self._ratio(n, "plain") * self._profile.verify(n, 1, near)
            wider = self._ratio(n, "verify") / plain
            widths = range(2, self._max_drafts + 2)
            steps = [max(self._profile.verify(n, w, near) * wider, 1.0) for w in widths]
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
        """Whether steps with drafts were timed, and plain ones, which all is relative to, not of
        late."""
        plain = self._ratios[n.bit_length(), "plain"]
        old = len(plain) < TIMED or self._now - plain[-1][0] > STALE
        return old and len(self._ratios[n.bit_length(), "verify"]) >= TIMED

    def _add(self, n: int, kind: str, ratio: float) -> None:
        self._ratios[n.bit_length(), kind].append((self._now, ratio))

    def _ratio(self, n: int, kind: str) -> float:
        """The median: what held up a single step says nothing."""
        ratios = self._ratios[n.bit_length(), kind]
        while ratios and self._now - ratios[0][0] > WINDOW:
            ratios.popleft()  # what seemed expensive once is tried again
        return median(ratio for _, ratio in ratios) if len(ratios) >= TIMED else 1.0


def _near(context: int) -> int:
    """The middle of the contexts that steps cost about the same for."""
    return context // NEAR * NEAR + NEAR // 2

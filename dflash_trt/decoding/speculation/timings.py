"""What steps cost now: the table of `costs.py`, corrected by what rounds are found to take."""

from collections import defaultdict, deque
from statistics import median
from typing import Protocol

NEAR = 256  # tokens of context that steps cost about the same for
REFRESH = 16  # rounds after which costs are corrected anew
TIMED = 3  # steps of a kind before their time is trusted
OLD = 128  # rounds after which a plain step is timed again
SOON = 32  # the same where a plain step loses little
FORGOTTEN = 512  # rounds after which other steps' times are
WAKING = 8.0  # times what drafting usually takes: more than that was something else
RECENT = 0.98  # weight of the past at each time that the drafter is woken
CHOICE_SECONDS = 2e-5  # what a row's takes in Python, before any were timed


class StepCosts(Protocol):
    """Seconds of steps: `costs.Costs`."""

    def verify(self, n: int, width: int, context: int) -> float: ...
    def draft(self, n: int, context: int) -> float: ...


class Timings:
    """By about how many rows there are. In plain steps, the time of one that verifies one token of
    each row."""

    def __init__(self, table: StepCosts, most: int) -> None:
        """most: drafts of a row that a round may verify."""
        self._table = table
        self._most = most
        self._slower: defaultdict[tuple[int, str], _Slower] = defaultdict(_Slower)
        self._woken: dict[int, float] = {}  # what rounds took that woke the drafter
        self._corrected: dict[tuple[int, int, bool], tuple[list[float], float]] = {}
        self._now = 0  # rounds that were timed

    def add(
        self, last: tuple[int, int, int], streak: int, verify: float, draft: float, choosing: float
    ) -> None:
        """Seconds of a round, as `Policy.timed` has them.

        last: its rows, drafts of a row, and context; streak: rounds before it, one after the other,
        behind which the drafter ran.
        """
        n, width, context = last
        near = _near(context)
        self._now += 1
        if not self._now % REFRESH:
            self._corrected.clear()
        self._of(n, "choice").add(choosing / (n * CHOICE_SECONDS), self._now)
        ratio = verify / self._table.verify(n, 1 + width, near)
        if not streak:
            if width:
                self._of(n, "wide").add(ratio, self._now)
            else:
                self._of(n, "plain").add(ratio, self._now, SOON)
        elif width and streak > 1:  # not the first behind a drafter that rested
            self._of(n, "drafted").add(ratio, self._now)
        if draft and streak:  # else it had features of more than a round to take in
            self._of(n, "draft").add(draft / self._table.draft(n, near), self._now)
        elif draft:
            at, took = n.bit_length(), (verify + draft) / self.plain(n, near) - 1
            self._woken[at] = max(took, RECENT * self._woken.get(at, 0.0))

    def costs(self, n: int, context: int, drafting: bool) -> tuple[list[float], float]:
        """Of a step with 0, 1, .. drafts a row, and of the drafter's.

        As measured while nothing else ran, times what rounds were found to take: caches that other
        steps have emptied, and other work on the machine, are not in the table. drafting: whether
        the drafter runs all the time; what is seldom done takes longer.
        """
        near = _near(context)
        if (n, near, drafting) not in self._corrected:
            unit = self._table.verify(n, 1, near)
            steps = [self._table.verify(n, 1 + k, near) / unit for k in range(self._most + 1)]
            draft = self._table.draft(n, near) / unit
            plain, wide, drafted, drafter = (
                self._of(n, kind) for kind in ("plain", "wide", "drafted", "draft")
            )
            for each in (wide, drafted, drafter):
                if each.age(self._now) > FORGOTTEN:
                    each.forget()  # what seemed to be dear once is tried again
            wide = drafted if drafting and drafted.known else wide
            if plain.known and wide.known:
                ratio = wide.middle() / plain.lately()
                steps = [1.0, *(max(step * ratio, 1.0) for step in steps[1:])]
            if plain.known and drafter.known:
                draft *= drafter.middle() / plain.lately()
            self._corrected[n, near, drafting] = steps, draft
        return self._corrected[n, near, drafting]

    def forget_drafting(self, n: int) -> None:
        """What steps took while the drafter ran all the time."""
        self._of(n, "drafted").forget()
        self._of(n, "draft").forget()
        self._corrected.clear()

    def plain(self, n: int, context: int) -> float:
        """Seconds of a plain step."""
        plain = self._of(n, "plain")
        return self._table.verify(n, 1, _near(context)) * (plain.lately() if plain.known else 1.0)

    def choice(self, n: int, context: int) -> float:
        """Of choosing for n rows."""
        slower = self._of(n, "choice")
        seconds = n * CHOICE_SECONDS * (slower.middle() if slower.known else 1.0)
        return seconds / self.plain(n, context)

    def waking(self, n: int, context: int) -> float:
        """Of a round behind a drafter that rested, beyond a plain one."""
        steps, draft = self.costs(n, context, drafting=False)
        usual = draft + steps[1] - 1
        return min(max(usual, self._woken.get(n.bit_length(), 0.0)), WAKING * usual)

    def lack_plain(self, n: int, cheap: bool) -> bool:
        """Whether steps with drafts were timed, and plain ones not of late; cheap: whether one now
        would lose little."""
        plain, *drafts = (self._of(n, kind) for kind in ("plain", "wide", "drafted"))
        unsure = not plain.known or plain.age(self._now) > (SOON if cheap else OLD)
        return unsure and any(each.known for each in drafts)

    def _of(self, n: int, kind: str) -> "_Slower":
        return self._slower[n.bit_length(), kind]


class _Slower:
    """How much longer steps of a kind take than the table has it."""

    def __init__(self) -> None:
        self._ratios: deque[tuple[int, float]] = deque(maxlen=10 * TIMED)  # by round
        self._last = 0  # round in which there was one
        self._middle: float | None = None  # if it is known already

    def add(self, ratio: float, now: int, old: int = OLD) -> None:
        """Of one step, in round `now`; old: rounds after which others say less."""
        self._ratios.append((now, ratio))
        # where others use the machine, what is seldom timed must not lag behind the rest
        while len(self._ratios) > TIMED and now - self._ratios[0][0] > TIMED * old:
            self._ratios.popleft()
        self._last, self._middle = now, None

    @property
    def known(self) -> bool:
        """Whether enough of them were timed."""
        return len(self._ratios) >= TIMED

    def age(self, now: int) -> int:
        """Rounds since the last one."""
        return now - self._last

    def forget(self) -> None:
        """As if none had been timed."""
        self._ratios.clear()
        self._middle = None

    def middle(self) -> float:
        """The median: what held up a single step says nothing."""
        if self._middle is None:
            self._middle = median(ratio for _, ratio in self._ratios)
        return self._middle

    def lately(self) -> float:
        """The median, or the last one where there are few and it is less: a step takes longer than
        it should by chance, but not less, and plain ones that seem slow would seldom be timed."""
        few = len(self._ratios) == TIMED
        return min(self.middle(), self._ratios[-1][1]) if few else self.middle()


def _near(context: int) -> int:
    """The middle of the contexts that steps cost about the same for."""
    return context // NEAR * NEAR + NEAR // 2

"""What rounds have shown of times, of the drafter's worth and of its drafts."""

from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from statistics import median

from dflash_trt.decoding.tree import depths

MEMORY = 0.99  # weight of the past at each outcome: about the last 100 count
RECENT = 0.98  # the same of what drafting brings; a shorter one gives up in each bad text
STAKE = 1.0  # plain steps that drafting may lose before it is given up
SIGN = 0.5  # plain steps that it has to gain before it starts anew
AGAIN = 0.05  # of its cost, that drafting must gain where it does not pay yet
TIMED = 4  # steps of a kind before their time is trusted
PRIOR = 3.0  # drafts that are taken to be as the drafter says, before any were seen


class Slower:
    """How much longer steps of a kind take than the table has it."""

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=8 * TIMED)
        self._last = 0  # round in which there was one
        self._middle: float | None = None  # if it is known already

    def add(self, ratio: float, now: int) -> None:
        """Of one step, in round `now`."""
        self._ratios.append(ratio)
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
            self._middle = median(self._ratios)
        return self._middle


class Worth:
    """What drafting, or choosing, gains in a situation."""

    def __init__(self, pays: bool) -> None:
        self._gained = 0.0  # plain steps, of late
        self.pays = pays

    def add(self, gained: float, cost: float) -> None:
        """Plain steps that one round of it gained, and that it took."""
        if self.pays:
            self._gained = self._gained * RECENT + gained
            found_wrong = self._gained < -STAKE
        else:
            self._gained = max(self._gained + gained - AGAIN * cost, 0.0)
            found_wrong = self._gained > SIGN
        if found_wrong:
            self.pays, self._gained = not self.pays, 0.0


class Depths:
    """How the drafter's probabilities and what is accepted compare, by depth.

    What is not known of a depth is taken to be as before it: else bad luck far down a chain would
    end there whatever could teach better.
    """

    def __init__(self, most: int) -> None:
        self._said = [0.0] * (most + 1)
        self._kept = [0.0] * (most + 1)
        self._ratios = [1.0] * (most + 1)

    def expected(self, values: Sequence[float], parents: Sequence[int]) -> list[float]:
        """How many of the first 0, 1, .. drafts are accepted, by the drafter's word for each."""
        ratios = map(self._ratios.__getitem__, depths(tuple(parents))[1:])
        chances = (min(chance, 1.0) for chance in map(mul, values, ratios))
        return [*accumulate(chances, initial=0.0)]

    def observe(self, values: Sequence[float], parents: Sequence[int], accepted: int) -> None:
        """Learn from how many were kept."""
        said = [0.0] * len(self._said)
        at = depths(tuple(parents))[1:]
        for depth, value in zip(at, values, strict=True):
            said[depth] += value
        ratio, step = 1.0, 1.0
        for depth in range(1, len(said)):
            self._said[depth] = self._said[depth] * MEMORY + said[depth]
            self._kept[depth] = self._kept[depth] * MEMORY + (depth <= accepted)
            ratio = (self._kept[depth] + PRIOR * ratio * step) / (self._said[depth] + PRIOR)
            self._ratios[depth] = ratio
            if depth == 1:
                step = ratio

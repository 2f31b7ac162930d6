"""Whether the drafter runs: it does while what it gained is more than what it lost."""

# plain steps that drafting of one row may lose before the gate closes; the first time, when
# acceptance has yet to be learned, more
FIRST_CREDIT, CREDIT = 6.0, 3.0
MAX_CREDIT = 10.0  # old gains must not hide that drafting loses now
OPENS = 0.5  # plain steps that probes have to gain before it opens again
MARGIN = 0.05  # of a probe's cost, that it has to gain in order to count


class Gate:
    """One for each batch-size bucket; all figures are in plain steps.

    Closed, it is probed now and then, and opens when probes gain clearly: it does not flap where
    drafting is even. The gain of n rows together varies less than that of one, by the root of n, so
    that less of it is enough to tell.
    """

    def __init__(self, rows: int = 1, *, first: bool = True) -> None:
        """first: no gate for such requests has told of acceptance yet."""
        self.open = True
        self._scale = rows**-0.5
        self._credit = (FIRST_CREDIT if first else CREDIT) * self._scale

    def add(self, gained: float, cost: float) -> None:
        """What a round after the drafter gained against one without it, and what it cost."""
        if self.open:
            self._credit = min(self._credit + gained, MAX_CREDIT * self._scale)
            if self._credit < 0:
                self.open, self._credit = False, 0.0
        else:
            self._credit = max(self._credit + gained - MARGIN * cost, 0.0)
            if self._credit > OPENS * self._scale:
                self.open, self._credit = True, CREDIT * self._scale

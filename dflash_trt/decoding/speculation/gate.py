"""Whether the drafter runs: it does while what it gained is more than what it lost."""

# plain steps that drafting of one row may lose before the gate closes; the first time, when
# acceptance has yet to be learned, more
FIRST_CREDIT, CREDIT = 6.0, 3.0
MAX_CREDIT = 10.0  # old gains must not hide that drafting loses now
OPENS = 0.5  # plain steps that probes have to gain before it opens again
MARGIN = 0.05  # of a probe's cost, that it has to gain in order to count


class Gates:
    """One for each batch-size bucket, sampled or not."""

    def __init__(self) -> None:
        self._gates: dict[tuple[int, bool], Gate] = {}

    def at(self, n: int, sampled: bool) -> "Gate":
        """For a round of n rows."""
        key = n.bit_length(), sampled
        if key not in self._gates:
            self._gates[key] = Gate(n, first=not any(its == sampled for _, its in self._gates))
        return self._gates[key]

    def any_open(self, n: int) -> bool:
        """Whether the drafter may run beside n rows, as far as is known."""
        gates = [gate for (at, _), gate in self._gates.items() if at == n.bit_length()]
        return not gates or any(gate.open for gate in gates)


class Gate:
    """All figures are in plain steps.

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

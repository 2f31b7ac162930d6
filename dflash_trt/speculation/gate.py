"""Gate: stops drafting where it does not pay, and tries it again. Figures are in plain steps."""

CREDIT = 3.0  # plain steps per row that drafting may lose before the gate closes
MAX_CREDIT = 10.0  # limits how long past gains hide present losses
MIN_CREDIT = 0.5  # of a new text alone, after many that drafting slowed down
OPENS = 0.5  # plain steps that probes must gain to reopen the gate
MARGIN = 0.05  # gain that a probe must exceed, as a fraction of its cost
OPEN_MARGIN = 0.05  # likewise of a round while the gate is open: costs are higher than they look


class Gate:
    """Gate that stops drafting where it does not pay.

    While closed it is probed now and then, and reopens when probes gain clearly, so that it does
    not oscillate at break-even. The mean gain of n rows varies less, by sqrt(n), so thresholds
    shrink with it.
    """

    def __init__(self, rows: int = 1, *, is_open: bool = True) -> None:
        self.open = is_open
        self._scale = rows**-0.5
        self._granted = CREDIT * self._scale
        self._credit = self._granted if is_open else 0.0

    def try_again(self) -> None:
        """Open the gate for a new text: texts differ more in acceptance than parts of one.

        The credit halves with each text that closed the gate, and doubles with others.
        """
        if self.open:
            self._granted = min(self._granted * 2, CREDIT * self._scale)
        else:
            self._granted = max(self._granted / 2, MIN_CREDIT * self._scale)
        self.open = True
        self._credit = self._granted

    def add(self, gained: float, cost: float) -> None:
        """Add a round's gain over plain decoding, and its cost."""
        if self.open:
            gained -= OPEN_MARGIN * cost
            self._credit = min(self._credit + gained, MAX_CREDIT * self._scale)
            if self._credit < 0:
                self.open = False
                self._credit = 0.0
        else:
            self._credit = max(self._credit + gained - MARGIN * cost, 0.0)
            if self._credit > OPENS * self._scale:
                self.open = True
                self._credit = CREDIT * self._scale

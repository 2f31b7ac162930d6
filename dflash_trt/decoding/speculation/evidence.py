"""What rounds have shown that drafting brings, and choosing."""

RECENT = 0.98  # weight of the past at each round; a shorter memory gives up in each bad text
STAKE = 3.0  # plain steps that drafting may lose before it is given up
# the same for the first time, when what it is measured by has yet to be learned, if that is more:
# so many times what a step of drafting should gain
FIRST_STAKE = 16.0
SIGN = 0.5  # plain steps that it has to gain before it starts anew
AGAIN = 0.05  # of its cost, that drafting must gain where it does not pay yet
CHEAPER = 0.85  # of what a step with drafts took when drafting did not pay: worth a new stake
CHOICE_STAKE = 1.0  # plain steps that choices may lose before they become rare
CHOICE_SHARE, LITTLE = 0.005, 0.002  # of the time, for choices; and where they do not pay
LONGEST_REST = 63  # rounds without a choice


class Worth:
    """What drafting, or choosing, gains in a situation."""

    def __init__(self, pays: bool, stake: float, first: float) -> None:
        """stake: plain steps that it may lose before it is given up; first: the first time."""
        self._gained = self._owed = 0.0  # plain steps, of late
        self._stake, self._next_stake = first, stake
        self._step = 0.0  # what a step with drafts took when it was tried, or gained last
        self.pays = pays

    def cheaper(self, step: float) -> bool:
        """Whether a step with drafts, which takes so many plain steps now, took clearly more when
        it was found not to pay: others use the machine, and what was found out then says less."""
        if not self._step or self._gained > SIGN:
            self._step = step
        return not self.pays and step < CHEAPER * self._step

    def try_again(self, step: float) -> None:
        """Where a step with drafts takes so much, with a stake as the last one."""
        self.pays, self._gained, self._stake, self._step = True, 0.0, self._next_stake, step

    def owe(self, cost: float) -> None:
        """Plain steps that it took ahead of rounds, which share them."""
        self._owed += cost

    def add(self, gained: float, cost: float) -> None:
        """Plain steps that one round of it gained, and that it took."""
        share = (1 - RECENT) * self._owed
        self._owed -= share
        gained -= share
        if self.pays:
            # a small loss must add up to be found, an old gain must not hide one
            self._gained = gained + self._gained * (RECENT if self._gained > 0 else 1.0)
            found_wrong = self._gained < -self._stake
        else:
            self._gained = max(self._gained + gained - AGAIN * cost, 0.0)
            found_wrong = self._gained > SIGN
        if found_wrong:
            self.pays, self._gained, self._stake = not self.pays, 0.0, self._next_stake


class Rests:
    """How many rounds of plain decoding need no choice: in the end so many that choosing has its
    share of the time. What begins to repeat itself is seen that much later.
    """

    def __init__(self) -> None:
        self.kept = 0  # drafts, since the last choice
        self._worth: dict[int, Worth] = {}  # of choices, by about how many rows there are
        self._last = (0, 0.0, 0.0)  # rows, the round's cost and the choice's, in plain steps
        self._rest = 0  # the last one, half of it for each round since that was not plain

    def after(self, n: int, cost: float, choice: float, plain: bool) -> int:
        """Behind a choice for n rows; in plain steps, what its round costs, and what it did."""
        self._settle()
        self._last = n, cost, choice
        if not plain:
            self._rest //= 2  # one such round is not yet a loop
            return 0
        share = CHOICE_SHARE if self._worth_at(n).pays else LITTLE
        longest = min(int(choice / share), LONGEST_REST) if choice > CHOICE_SHARE else 0
        self._rest = min(2 * self._rest + 1, longest)
        return self._rest

    def _settle(self) -> None:
        """What the choice before has brought."""
        n, cost, choice = self._last
        if n:
            self._worth_at(n).add(1 + self.kept / n - cost - choice, choice)
        self.kept = 0

    def _worth_at(self, n: int) -> Worth:
        return self._worth.setdefault(n.bit_length(), Worth(True, CHOICE_STAKE, CHOICE_STAKE))

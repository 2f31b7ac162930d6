"""What each round verifies, by measured costs: nothing, a chain, tokens looked up, or a tree.

Pure: the same proposals and outcomes lead to the same choices, so that a record can be replayed.
All costs are in plain steps, the time of a step that verifies one token of each sequence."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from dflash_trt.decoding.speculation.costs import CostModel, StepCosts
from dflash_trt.decoding.speculation.proposal import Proposal, Row, StepPlan, depths

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


MEMORY = 0.98  # weight of the past at each outcome
PRIOR = 4.0  # outcomes that what is believed at the start is worth
MATCHES = (1, 2, 3, 5, 8)  # copies are counted by their match: the shortest of each
# that a copied token is right, at the start: of greedy texts, and of sampled ones
CHANCES = (0.48, 0.69, 0.74, 0.87, 0.95)
SAMPLED_CHANCES = (0.33, 0.55, 0.63, 0.74, 0.9)


class AcceptanceEstimator:
    """Decayed counts by source, position and whether tokens are sampled; of copies also by the
    length of the match and by whether the drafter contradicts them."""

    def __init__(self, max_drafts: int) -> None:
        """max_drafts: of a row in a round."""
        self._max_drafts = max_drafts
        self._drafted = defaultdict[tuple[str, bool, bool], _Calibration](
            lambda: _Calibration(max_drafts)
        )
        self._copied: dict[tuple[bool, bool, int], _Copies] = {}

    def expected(self, proposal: Proposal) -> list[float]:
        """How many of its first 0, 1, .. draft tokens are accepted."""
        if proposal.source == "lookup":
            return self._copies(proposal).expected()[: len(proposal.tokens) + 1]
        return self._drafted[_kind(proposal)].expected(proposal.values, proposal.parents)

    def observe(self, proposal: Proposal, accepted: int) -> None:
        """How many draft tokens of a verified proposal were kept."""
        if proposal.source == "lookup":
            self._copies(proposal).observe(len(proposal.tokens), accepted)
        else:
            self._drafted[_kind(proposal)].observe(proposal.values, proposal.parents, accepted)

    def _copies(self, proposal: Proposal) -> "_Copies":
        bucket = bisect_right(MATCHES, proposal.match) - 1
        key = (proposal.sampled, proposal.contradicted, bucket)
        if key not in self._copied:
            chance = (SAMPLED_CHANCES if proposal.sampled else CHANCES)[bucket]
            self._copied[key] = _Copies(self._max_drafts, chance)
        return self._copied[key]


def _kind(proposal: Proposal) -> tuple[str, bool, bool]:
    """What is counted together: by source, whether tokens are sampled, and under a grammar."""
    return proposal.source, proposal.sampled, bool(proposal.forced)


class _Copies:
    """How often copied tokens were right, by place."""

    def __init__(self, count: int, chance: float) -> None:
        self._reached = [PRIOR] * count  # of token j: all before it were kept
        self._kept = [PRIOR * chance] * count

    def expected(self) -> list[float]:
        chances = (kept / reached for kept, reached in zip(self._kept, self._reached, strict=True))
        return [*accumulate(accumulate(chances, mul), initial=0.0)]

    def observe(self, copied: int, accepted: int) -> None:
        for j in range(min(accepted + 1, copied)):
            self._reached[j] = self._reached[j] * MEMORY + 1.0
            self._kept[j] = self._kept[j] * MEMORY + (j < accepted)


class _Calibration:
    """How the drafter's probabilities compare with what is accepted, by depth.

    What is not known of a depth is taken to go on as before it: otherwise nothing would be learned
    of depths that are seldom verified.
    """

    def __init__(self, max_depth: int) -> None:
        self._said, self._kept = [0.0] * (max_depth + 1), [0.0] * (max_depth + 1)
        self._ratios = [1.0] * (max_depth + 1)

    def expected(self, values: Sequence[float], parents: Sequence[int]) -> list[float]:
        ratios = map(self._ratios.__getitem__, depths(tuple(parents))[1:])
        chances = (min(chance, 1.0) for chance in map(mul, values, ratios))
        return [*accumulate(chances, initial=0.0)]

    def observe(self, values: Sequence[float], parents: Sequence[int], accepted: int) -> None:
        said = [0.0] * len(self._said)
        for depth, value in zip(depths(tuple(parents))[1:], values, strict=True):
            said[depth] += value
        ratio, first = 1.0, 1.0
        for depth in range(1, len(said)):
            self._said[depth] = self._said[depth] * MEMORY + said[depth]
            self._kept[depth] = self._kept[depth] * MEMORY + (depth <= accepted)
            ratio = (self._kept[depth] + PRIOR * ratio * first) / (self._said[depth] + PRIOR)
            self._ratios[depth] = ratio
            first = self._ratios[1]


CLEARLY = 1.02  # how much more drafts must promise than plain decoding
REPEATS = 0.6  # share of its copied tokens that a text keeps which repeats itself
PROBING = 0.005  # share of the time that the drafter may take while its gate is closed
WAKING = 8.0  # times what drafting usually takes: a probe that took more met something else
CHOICE_SHARE = 0.005  # of the time, for choices where none is needed
MAX_REST = 63  # rounds without a choice

Expected = tuple[Proposal, list[float]]  # and how many of its first 0, 1, .. tokens are accepted


class Policy:
    """Chooses before each round, and is told of each row after it. This one learns nothing."""

    def __init__(self, draft_tokens: int) -> None:
        """draft_tokens: how many the drafter is asked for at most, and after a prompt."""
        self.draft_tokens = draft_tokens

    def choose(self, rows: Sequence[Row], context: int, feed: bool = False) -> StepPlan:
        """context: tokens of a row, on average; feed: whether the drafter has to run."""
        raise NotImplementedError

    def prefill(self, n: int, sampled: bool) -> bool:
        """Whether the drafter should run after a prompt's chunk; n: sequences there will be."""
        return self.draft_tokens > 0

    def holds(self, budget: int) -> bool:
        """Whether the drafter may have use for a sequence that has so many tokens to come."""
        return self.draft_tokens > 0

    def observe(self, proposal: Proposal, accepted: int) -> None:
        """How many draft tokens of a verified proposal were kept."""

    def timed(self, verify: float, draft: float, choosing: float) -> None:
        """Seconds of a round as it was chosen last: of the drafter (0: it did not run), and of all
        the rest; and of the choice itself. Of plain rounds that follow a choice it is told the
        last."""


class Fixed(Policy):
    """Always a chain of so many draft tokens, or plain decoding with 0 of them."""

    def choose(self, rows: Sequence[Row], context: int, feed: bool = False) -> StepPlan:
        most = self.draft_tokens
        first = [row.proposals[0].cut(most) if row.proposals and most else None for row in rows]
        return StepPlan(first, most)


class Adaptive(Policy):
    """The width and the proposals that promise the most tokens in a time.

    A round of n rows commits n tokens and the drafts that are accepted. Whether the drafter runs
    afterwards is its gate's matter: one for each batch-size bucket, sampled or not.
    """

    def __init__(self, profile: StepCosts, draft_tokens: int, max_drafts: int) -> None:
        """max_drafts: of a row in a round."""
        super().__init__(draft_tokens)
        self._costs = CostModel(profile, max_drafts)
        self._estimator = AcceptanceEstimator(max_drafts)
        self._gates = Gates()
        self._last = (0, 0, 0)  # rows, width and context of the last round
        self._drafted = False  # whether the drafter ran after the last round
        self._streak = 0  # rounds before the last one, in a row, after which it ran
        self._probing = False  # whether it ran only to see whether it pays again
        self._probe_cost = 0.0  # of the last probe, beyond a plain step
        self._idle = 0  # rounds since it ran
        self._rest = 0  # see `StepPlan`, of the last one

    def choose(self, rows: Sequence[Row], context: int, feed: bool = False) -> StepPlan:
        """See `Policy`."""
        n = len(rows)
        drafted, self._drafted = self._drafted, False
        self._streak = self._streak + 1 if drafted else 0
        gate = self._gates.at(n, any(row.sampled for row in rows))
        steps, draft = self._costs.costs(n, context)
        expected = [[(x, self._estimator.expected(x)) for x in row.proposals] for row in rows]
        width, tokens = _best(expected, steps, draft if drafted else 0.0)
        if drafted and any(expected):
            others = [[x for x in row if x[0].source != "drafter"] for row in expected]
            alone, without = _best(others, steps, 0.0)
            cost = steps[width] + draft
            gate.add(tokens[width] * steps[alone] / without[alone] - cost, cost)
            if self._probing and not width:
                width = 1  # otherwise what is believed of drafts could never be found wrong
        needs_plain = self._costs.needs_plain(n)
        chosen = [_take(row, 0 if needs_plain else width) for row in expected]
        runs = feed or self._drafts_next(gate, rows, chosen, (steps, draft))
        runs = runs and self.draft_tokens > 0  # otherwise nothing drafts but what the text repeats
        if needs_plain and drafted:
            runs = feed  # a plain step after the drafter takes longer
        if runs:
            self._drafted, self._idle = True, -1
        width = max((len(each.tokens) for each in chosen if each), default=0)
        self._last = n, width, context
        self._rest = self._next_rest(self._costs.choice(n, context), plain=not (width or runs))
        self._idle += 1 + self._rest
        return StepPlan(chosen, self.draft_tokens if runs else 0, self._rest)

    def prefill(self, n: int, sampled: bool) -> bool:
        """See `Policy`."""
        return self.draft_tokens > 0 and self._gates.at(n, sampled).open

    def holds(self, budget: int) -> bool:
        """See `Policy`. Not where the gate is closed, and the sequence will have ended before the
        drafter is tried again."""
        if not self.draft_tokens:
            return False
        opens = self._gates.any_open(self._last[0])
        return opens or self._idle + budget >= self._probe_cost / PROBING

    def observe(self, proposal: Proposal, accepted: int) -> None:
        """See `Policy`."""
        self._estimator.observe(proposal, accepted)

    def timed(self, verify: float, draft: float, choosing: float) -> None:
        """See `Policy`."""
        n, width, context = self._last
        self._costs.add(n, width, context, verify, draft, self._streak)
        self._costs.add_choice(n, choosing)
        if self._probing and draft:
            self._probe_cost = draft / self._costs.plain_seconds(n, context)

    def _drafts_next(
        self,
        gate: Gate,
        rows: Sequence[Row],
        chosen: Sequence[Proposal | None],
        costs: tuple[Sequence[float], float],
    ) -> bool:
        """Whether the drafter should run after this round."""
        self._probing = False
        if any(row.out_of_sync for row in rows):
            return False
        if gate.open:
            return not all(map(self._repeats, chosen))
        steps, draft = costs
        usual = draft + steps[1] - 1
        self._probe_cost = min(max(self._probe_cost, usual), WAKING * usual)
        self._probing = self._idle >= self._probe_cost / PROBING
        return self._probing

    def _repeats(self, proposal: Proposal | None) -> bool:
        """Whether a row repeats itself: there is more to be looked up afterwards."""
        if proposal is None or proposal.source != "lookup":
            return False
        return self._estimator.expected(proposal)[-1] >= REPEATS * len(proposal.tokens)

    def _next_rest(self, choosing: float, plain: bool) -> int:
        """Twice as many rounds each time, up to where choosing takes its share of the time."""
        if not plain:
            return 0
        longest = min(int(choosing / CHOICE_SHARE), MAX_REST) if choosing > CHOICE_SHARE else 0
        return min(2 * self._rest + 1, longest)


def _best(
    rows: Sequence[Sequence[Expected]], steps: Sequence[float], draft: float
) -> tuple[int, list[float]]:
    """The number of drafts with the most tokens in a time, and the tokens with each number.

    steps: costs by drafts; draft: what else a round costs.
    """
    lines = [[line for _, line in row] for row in rows if row]
    longest = max((len(line) for row in lines for line in row), default=1)
    tokens = [float(len(rows))] * min(longest, len(steps))
    for row in lines:
        padded = [line + [line[-1]] * (longest - len(line)) for line in row]
        tokens = [total + max(of) for total, *of in zip(tokens, *padded, strict=False)]
    rates = [count / (step + draft) for count, step in zip(tokens, steps, strict=False)]
    width = rates.index(max(rates))
    return (width if rates[width] > CLEARLY * rates[0] else 0), tokens


def _take(row: Sequence[Expected], width: int) -> Proposal | None:
    """The better one at this width."""
    if not width or not row:
        return None
    proposal, line = max(row, key=lambda x: x[1][min(width, len(x[1]) - 1)])
    return proposal.cut(width) if line[min(width, len(line) - 1)] > 0 else None

"""What each round verifies, by measured costs: nothing, a chain, tokens looked up, or a tree.

Pure: the same proposals and outcomes lead to the same choices, so that a record can be replayed.
All costs are in plain steps, the time of a step that verifies one token of each sequence.
"""

from collections.abc import Sequence

from dflash_trt.decoding.speculation.acceptance_estimator import AcceptanceEstimator
from dflash_trt.decoding.speculation.cost_model import CostModel, StepCosts
from dflash_trt.decoding.speculation.gate import Gate, Gates
from dflash_trt.decoding.speculation.proposal import Proposal, Row, StepPlan

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

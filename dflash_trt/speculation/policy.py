"""Policy: choose by measured costs whether a round verifies nothing, drafts or a copy.

Deterministic: the same proposals, outcomes and times give the same choices, so that a record can
be replayed. All costs are in plain steps, the time of a step that verifies one token per sequence.
"""

from collections.abc import Sequence
from math import exp, log1p

from dflash_trt.speculation.costs import CostModel, StepCosts
from dflash_trt.speculation.estimator import AcceptanceEstimator
from dflash_trt.speculation.gate import OPEN_MARGIN, Gate
from dflash_trt.speculation.proposal import Proposal, Row, StepPlan

CLEARLY = 1.04  # factor by which drafts must beat plain decoding: the best choice looks too good
REPEATS = 0.6  # fraction of copied tokens accepted in a repetitive text
PROBING = 0.005  # fraction of time the drafter may take while its gate is closed
WAKING = 8.0  # limit of a probe's cost over the usual one; more is noise

Expected = tuple[Proposal, list[float]]  # with expected accepted tokens of its first 0, 1, ..


class Policy:
    """Interface of policies: `choose` before each round, outcomes afterwards."""

    def __init__(self, draft_tokens: int) -> None:
        self.draft_tokens = draft_tokens  # requested of the drafter at most, and after a prompt

    def choose(
        self,
        rows: Sequence[Row],
        context: int,
        feed: bool = False,
        waiting: bool = False,
        coming: int = 0,
    ) -> StepPlan:
        """Choose a round; context: mean tokens per row; feed: whether the drafter must run.

        waiting: whether other sequences wait for these to end; coming: how many get a place before.
        """
        raise NotImplementedError

    def begin(self, sampled: bool) -> None:
        """Note that a text begins with no other beside it."""

    def prefill(self, n: int, sampled: bool) -> bool:
        """Return whether the drafter should run after a prompt chunk; n: sequences then active."""
        return self.draft_tokens > 0

    def prefilled(self, n: int, sampled: bool, draft: float) -> None:
        """Record the seconds of the drafter after a prompt chunk, as `prefill` wanted it."""

    def keeps_features(self, budget: int) -> bool:
        """Return whether the drafter may run again for a sequence with `budget` tokens left."""
        return self.draft_tokens > 0

    def observe(self, proposal: Proposal, accepted: int) -> None:
        """Record how many drafts of a verified proposal were accepted."""

    def timed(self, verify: float, draft: float) -> None:
        """Record seconds of the last round: the drafter (0: not run), and the rest."""


class Fixed(Policy):
    """Policy that always verifies a chain of `draft_tokens`; 0: plain decoding."""

    def choose(
        self,
        rows: Sequence[Row],
        context: int,
        feed: bool = False,
        waiting: bool = False,
        coming: int = 0,
    ) -> StepPlan:
        most = self.draft_tokens
        first = [row.proposals[0].cut(most) if row.proposals and most else None for row in rows]
        return StepPlan(first, most)


class Adaptive(Policy):
    """Policy that maximizes expected tokens per unit of time.

    A round of n rows commits n tokens and the accepted drafts. A gate per batch-size bucket,
    sampled or not, decides whether the drafter runs afterwards.
    """

    def __init__(self, profile: StepCosts, draft_tokens: int, max_drafts: int) -> None:
        super().__init__(draft_tokens)
        self._costs = CostModel(profile, max_drafts)
        self._estimator = AcceptanceEstimator(max_drafts)
        self._gates: dict[tuple[int, bool], Gate] = {}  # by batch-size bucket, sampled or not
        self._last = (0, 0, 0)  # rows, width and context of the last round
        self._drafted = False  # whether the drafter ran after the last round
        self._streak = 0  # rounds in a row, before the last one, that ended with the drafter
        self._probing = False  # whether the drafter ran only to test the gate
        self._probe_cost = 0.0  # of the last probe, beyond a plain step
        self._idle = 0  # rounds since the drafter ran

    def choose(
        self,
        rows: Sequence[Row],
        context: int,
        feed: bool = False,
        waiting: bool = False,
        coming: int = 0,
    ) -> StepPlan:
        n = len(rows)
        drafted, self._drafted = self._drafted, False
        self._streak = self._streak + 1 if drafted else 0
        gate = self._gate(n, any(row.sampled for row in rows))
        steps, draft = self._costs.costs(n, context)
        expected = [[(x, self._estimator.expected(x)) for x in row.proposals] for row in rows]
        width, tokens = _best_width(expected, steps, draft if drafted else 0.0, waiting)
        for row in rows:
            for proposal in row.proposals:
                if proposal.source == "drafter":
                    self._estimator.note(proposal)
        if drafted and any(expected):
            others = [[x for x in row if x[0].source != "drafter"] for row in expected]
            alone, without = _best_width(others, steps, 0.0, waiting)
            cost = steps[width] + draft
            # the time that decoding without the drafter takes for these tokens, less the round's
            gate.add(tokens[width] * steps[alone] / without[alone] - cost, cost)
            if self._probing and not width:
                width = 1  # verify at least one, or a wrong estimate is never corrected
        needs_plain = self._costs.needs_plain(n)  # to compare the costs of drafts with
        chosen = [_best_proposal(row, 0 if needs_plain else width) for row in expected]
        # the drafter would hold up the prompts of those that come, and soon stop
        together = self._gate(n + coming, any(row.sampled for row in rows))
        runs = feed or (
            (together.open or not coming) and self._should_draft(gate, rows, chosen, (steps, draft))
        )
        runs = runs and self.draft_tokens > 0  # 0: no drafter, lookup only
        if needs_plain and drafted:
            runs = feed  # a plain step right after the drafter is slower
        if runs:
            self._drafted, self._idle = True, -1
        width = max((len(each.tokens) for each in chosen if each), default=0)
        self._last = n, width, context
        self._idle += 1
        return StepPlan(chosen, self.draft_tokens if runs else 0)

    def begin(self, sampled: bool) -> None:
        self._gate(1, sampled).try_again()

    def prefill(self, n: int, sampled: bool) -> bool:
        return self.draft_tokens > 0 and self._gate(n, sampled).open

    def prefilled(self, n: int, sampled: bool, draft: float) -> None:
        """Charge the gate: drafting has to bring that in again, too."""
        self._gate(n, sampled).add(-draft / self._costs.plain_seconds(n, self._last[2]), 0.0)

    def _may_pay(self, n: int, sampled: bool) -> bool:
        """Return whether drafts of typical acceptance make n rows faster."""
        steps, draft = self._costs.costs(n, self._last[2])
        accepted = self._estimator.typical(sampled)
        rates = [
            (1 + tokens) / (cost + draft) for tokens, cost in zip(accepted, steps, strict=False)
        ]
        return max(rates) > 1 + OPEN_MARGIN

    def keeps_features(self, budget: int) -> bool:
        """Return whether the gate is open, or a probe is due within the budget."""
        if not self.draft_tokens:
            return False
        bucket = self._last[0].bit_length()
        gates = [gate for (at, _), gate in self._gates.items() if at == bucket]
        opens = not gates or any(gate.open for gate in gates)
        return opens or self._idle + budget >= self._probe_cost / PROBING

    def _gate(self, n: int, sampled: bool) -> Gate:
        key = n.bit_length(), sampled
        if key not in self._gates:
            self._gates[key] = Gate(n, is_open=self._may_pay(n, sampled))
        return self._gates[key]

    def observe(self, proposal: Proposal, accepted: int) -> None:
        self._estimator.observe(proposal, accepted)

    def timed(self, verify: float, draft: float) -> None:
        n, width, context = self._last
        self._costs.add(n, width, context, verify, draft, self._streak)
        if self._probing and draft:
            self._probe_cost = draft / self._costs.plain_seconds(n, context)

    def _should_draft(
        self,
        gate: Gate,
        rows: Sequence[Row],
        chosen: Sequence[Proposal | None],
        costs: tuple[Sequence[float], float],
    ) -> bool:
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
        """Return whether a text repeats itself, so that lookup will serve the next round too."""
        if proposal is None or proposal.source != "lookup":
            return False
        return self._estimator.expected(proposal)[-1] >= REPEATS * len(proposal.tokens)


def _best_width(
    rows: Sequence[Sequence[Expected]], costs: Sequence[float], draft_cost: float, waiting: bool
) -> tuple[int, list[float]]:
    """Return the width with the most tokens per time, and the tokens at each width.

    If none wait for a place, tokens are the rows' geometric mean, times the rows: a round that
    hurries some of them holds up the others, which then go on without company, at a step's whole
    cost.
    """
    lines = [[line for _, line in row] for row in rows if row]
    if not lines:
        return 0, [float(len(rows))]
    longest = max((len(line) for row in lines for line in row), default=1)
    widths = min(longest, len(costs))
    drafts = [0.0] * widths
    logs = [0.0] * widths
    for row in lines:
        padded = [line + [line[-1]] * (longest - len(line)) for line in row]
        for width, expected in zip(range(widths), zip(*padded, strict=False), strict=False):
            drafts[width] += max(expected)
            logs[width] += log1p(max(expected))
    tokens = [len(rows) + total for total in drafts]
    if not waiting:
        tokens = [len(rows) * exp(total / len(rows)) for total in logs]
    rates = [count / (cost + draft_cost) for count, cost in zip(tokens, costs, strict=False)]
    width = rates.index(max(rates))
    return (width if rates[width] > CLEARLY * rates[0] else 0), tokens


def _best_proposal(row: Sequence[Expected], width: int) -> Proposal | None:
    """Return the proposal with the most expected tokens at this width, cut to it."""
    if not width or not row:
        return None
    proposal, line = max(row, key=lambda x: x[1][min(width, len(x[1]) - 1)])
    return proposal.cut(width) if line[min(width, len(line) - 1)] > 0 else None

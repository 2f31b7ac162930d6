"""Policy: choose by measured costs whether a round verifies nothing, drafts or an n-gram lookup.

Deterministic: the same proposals, outcomes and times give the same choices, so that a record can
be replayed. All costs are in plain steps, the time of a step that verifies one token per sequence.
"""

from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple

from dflash_trt.speculation.costs import Bucket, CostModel, RoundCosts, StepCosts
from dflash_trt.speculation.estimator import AcceptanceEstimator
from dflash_trt.speculation.gate import OPEN_MARGIN, Gate
from dflash_trt.speculation.proposal import Proposal, RoundPlan, SequenceProposals

CLEARLY = 1.04  # factor by which drafts must beat plain decoding: the best choice looks too good
REPEATS = 0.6  # fraction of copied tokens accepted in a repetitive text
PROBING = 0.005  # fraction of time the drafter may take while its gate is closed
# wait so many rounds before drafting when the last lone text soon got company
ALONE = 4
WAKING = 8.0  # cap on a probe's cost, as a multiple of the expected; more is noise
RESTING = 4  # plain rounds in a row, after which only every second round is chosen


class Expected(NamedTuple):
    proposal: Proposal
    tokens: list[float]  # expected to be accepted of its first 0, 1, ..

    def at(self, draft_len: int) -> float:
        return self.tokens[min(draft_len, len(self.tokens) - 1)]


class DrafterRun(Enum):
    """Whether the drafter runs after a round, and what for."""

    NONE = auto()
    DRAFTS = auto()
    PROBE = auto()  # to test a closed gate


class LastRound(NamedTuple):
    """The last round as it was planned."""

    sequences: int = 0
    draft_len: int = 0
    context: int = 0
    sampled: bool = False  # whether a sequence was
    drafter: DrafterRun = DrafterRun.NONE
    rested: bool = False  # it was plain without a choice

    @property
    def drafted(self) -> bool:
        return self.drafter is not DrafterRun.NONE


class Company:
    """Guesses from the last text that began alone whether others will soon join this one."""

    def __init__(self) -> None:
        self._is_watching = False  # whether a text has begun alone and may still be joined soon
        self._rounds_alone = 0  # of that text
        self._was_joined = False  # whether the last such text was joined within `ALONE` rounds

    def begin(self) -> None:
        """Watch a text that begins alone."""
        self._is_watching = True
        self._rounds_alone = 0

    def note(self, n: int) -> None:
        """Take in how many sequences a round has."""
        if not self._is_watching:
            return
        if n == 1 and self._rounds_alone < ALONE:
            self._rounds_alone += 1
            return
        self._was_joined = n > 1
        self._is_watching = False

    @property
    def is_expected(self) -> bool:
        """Whether a text has just begun alone as the last one did, which others soon joined."""
        return self._was_joined and self._is_watching


class Policy:
    """Interface of policies: `choose` before each round, outcomes afterwards."""

    def __init__(self, draft_tokens: int) -> None:
        self.draft_tokens = draft_tokens  # requested of the drafter at most, and after a prompt

    def choose(
        self,
        rows: Sequence[SequenceProposals],
        context: int,
        feed: bool = False,
        waiting: bool = False,
        coming: int = 0,
    ) -> RoundPlan:
        """Choose a round; context: mean tokens per row; feed: whether the drafter must run.

        waiting: whether other sequences wait; coming: new sequences that will join even if no
        current one finishes.
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
        rows: Sequence[SequenceProposals],
        context: int,
        feed: bool = False,
        waiting: bool = False,
        coming: int = 0,
    ) -> RoundPlan:
        chosen: list[Proposal | None] = [None] * len(rows)
        if self.draft_tokens:
            for index, row in enumerate(rows):
                if row.proposals:
                    chosen[index] = row.proposals[0].cut(self.draft_tokens)
        return RoundPlan(chosen, self.draft_tokens)


class Adaptive(Policy):
    """Policy that maximizes expected tokens per unit of time.

    A round of n rows commits n tokens and the accepted drafts. A gate per batch-size bucket,
    sampled or not, decides whether the drafter runs afterwards.
    """

    def __init__(self, profile: StepCosts, draft_tokens: int, max_drafts: int) -> None:
        super().__init__(draft_tokens)
        self._costs = CostModel(profile, max_drafts)
        self._estimator = AcceptanceEstimator(max_drafts)
        self._gates: dict[Bucket, Gate] = {}
        self._last = LastRound()
        self._streak = 0  # rounds in a row, before the last one, that ended with the drafter
        self._probe_cost = 0.0  # of the last probe, beyond a plain step
        self._idle = 0  # rounds since the drafter ran
        self._plain_rounds = 0  # in a row, of those that were chosen
        self._company = Company()

    def choose(
        self,
        rows: Sequence[SequenceProposals],
        context: int,
        feed: bool = False,
        waiting: bool = False,
        coming: int = 0,
    ) -> RoundPlan:
        n = len(rows)
        last = self._last
        self._company.note(n + coming)
        if self._may_rest(rows) and not feed:
            self._last = last._replace(rested=True)
            self._idle += 1
            return RoundPlan([None] * n, 0)
        sampled = any(row.sampled for row in rows)
        gate = self._gate(n, sampled)
        costs = self._costs.costs(n, context, sampled)
        expected = [self._expect(row) for row in rows]
        draft_cost = costs.draft if last.drafted else 0.0
        draft_len, tokens = _best_draft_len(expected, costs.steps, draft_cost, waiting)
        if last.drafted and any(expected):
            cost = (costs.steps[draft_len] + costs.draft) * self._costs.overrun(n, sampled)
            # this may open or close the gate
            _credit_drafter(gate, expected, tokens[draft_len], cost, costs, waiting)
            if last.drafter is DrafterRun.PROBE:
                draft_len = max(draft_len, 1)  # or a wrong estimate is never corrected
        self._note_drafts(rows)
        needs_plain = self._costs.needs_plain(n, sampled)  # to compare the costs of drafts with
        if needs_plain:
            draft_len = 0
        chosen = [_best_proposal(row, draft_len) for row in expected]
        if feed and self.draft_tokens:
            # the cost of a probe tells whether to wait for the next one
            drafter = DrafterRun.DRAFTS if gate.open else DrafterRun.PROBE
        else:
            drafter = self._choose_drafter(
                gate, rows, chosen, costs, needs_plain=needs_plain, coming=coming
            )
        self._streak = self._streak + 1 if last.drafted else 0
        runs = drafter is not DrafterRun.NONE
        self._idle = 0 if runs else self._idle + 1
        plan = RoundPlan(chosen, self.draft_tokens if runs else 0)
        self._last = LastRound(n, plan.draft_len, context, sampled, drafter)
        is_plain = plan.draft_len == 0 and not runs and not self._company.is_expected
        self._plain_rounds = self._plain_rounds + 1 if is_plain else 0
        return plan

    def _may_rest(self, rows: Sequence[SequenceProposals]) -> bool:
        """Return whether a choice would cost more than it brings; drafts are never thrown away."""
        if self._plain_rounds < RESTING or self._last.rested:
            return False
        if len(rows) != self._last.sequences:
            return False
        return not any(proposal.source == "drafter" for row in rows for proposal in row.proposals)

    def _expect(self, row: SequenceProposals) -> list[Expected]:
        return [
            Expected(proposal, self._estimator.expected(proposal)) for proposal in row.proposals
        ]

    def _note_drafts(self, rows: Sequence[SequenceProposals]) -> None:
        for row in rows:
            for proposal in row.proposals:
                if proposal.source == "drafter":
                    self._estimator.note(proposal)

    def begin(self, sampled: bool) -> None:
        self._gate(1, sampled).try_again()
        self._company.begin()

    def prefill(self, n: int, sampled: bool) -> bool:
        if not self.draft_tokens:
            return False
        if n == 1 and self._company.is_expected:
            return False
        return self._gate(n, sampled).open

    def prefilled(self, n: int, sampled: bool, draft: float) -> None:
        """Charge the gate: drafting has to bring that in again, too."""
        plain = self._costs.costs(n, self._last.context, sampled).plain_seconds
        self._gate(n, sampled).add(-draft / plain, 0.0)

    def _may_pay(self, n: int, sampled: bool) -> bool:
        """Return whether drafts of typical acceptance make n rows faster."""
        costs = self._costs.costs(n, self._last.context, sampled)
        accepted = self._estimator.typical(sampled)
        rates = [
            (1 + tokens) / (step + costs.draft)
            for tokens, step in zip(accepted, costs.steps, strict=False)
        ]
        return max(rates) > 1 + OPEN_MARGIN

    def keeps_features(self, budget: int) -> bool:
        """Return whether the gate is open, or a probe is due within the budget."""
        if not self.draft_tokens:
            return False
        batch = self._last.sequences.bit_length()
        gates = [gate for bucket, gate in self._gates.items() if bucket.batch == batch]
        if not gates or any(gate.open for gate in gates):
            return True
        return self._idle + budget >= self._probe_cost / PROBING

    def _gate(self, n: int, sampled: bool) -> Gate:
        bucket = Bucket.of(n, sampled)
        if bucket not in self._gates:
            smaller = self._gates.get(Bucket(bucket.batch - 1, sampled))
            if smaller is not None and not smaller.open:
                is_open = False  # more rows gain less
            else:
                is_open = self._may_pay(n, sampled)
            self._gates[bucket] = Gate(n, is_open=is_open)
        return self._gates[bucket]

    def observe(self, proposal: Proposal, accepted: int) -> None:
        self._estimator.observe(proposal, accepted)

    def timed(self, verify: float, draft: float) -> None:
        last = self._last
        if last.rested:
            return
        n, context = last.sequences, last.context
        self._costs.add(
            n, last.draft_len, context, verify, draft, self._streak, sampled=last.sampled
        )
        if last.drafter is DrafterRun.PROBE and draft:
            plain = self._costs.costs(n, context, last.sampled).plain_seconds
            self._probe_cost = draft / plain

    def _choose_drafter(
        self,
        gate: Gate,
        rows: Sequence[SequenceProposals],
        chosen: Sequence[Proposal | None],
        costs: RoundCosts,
        *,
        needs_plain: bool,
        coming: int,
    ) -> DrafterRun:
        """Return whether the drafter runs: while the gate is open, or to test it now and then."""
        if self.draft_tokens == 0:  # lookup only
            return DrafterRun.NONE
        if needs_plain and self._last.drafted:  # a plain step right after the drafter is slower
            return DrafterRun.NONE
        if coming and not self._gate(len(rows) + coming, any(row.sampled for row in rows)).open:
            return DrafterRun.NONE  # it would hold up those that come, and soon stop
        if self._company.is_expected:
            return DrafterRun.NONE
        if any(row.out_of_sync for row in rows):
            return DrafterRun.NONE
        if gate.open:
            repeats = all(map(self._repeats, chosen))
            return DrafterRun.NONE if repeats else DrafterRun.DRAFTS
        usual = costs.draft + costs.steps[1] - 1
        self._probe_cost = min(max(self._probe_cost, usual), WAKING * usual)
        is_due = self._idle >= self._probe_cost / PROBING
        return DrafterRun.PROBE if is_due else DrafterRun.NONE

    def _repeats(self, proposal: Proposal | None) -> bool:
        """Return whether a text repeats itself, so that lookup will serve the next round too."""
        if proposal is None or proposal.source != "lookup":
            return False
        return self._estimator.expected(proposal)[-1] >= REPEATS * len(proposal.tokens)


def _best_draft_len(
    rows: Sequence[Sequence[Expected]], costs: Sequence[float], draft_cost: float, waiting: bool
) -> tuple[int, list[float]]:
    """Return the draft length with the most tokens per time, and the tokens at each length.

    If none wait for a place, tokens are the rows' harmonic mean, times the rows: the mean time for
    a token counts. A round that hurries some rows holds up the others, which then go on without
    company, at a step's whole cost.
    """
    lines = [[expected.tokens for expected in row] for row in rows if row]
    plain = float(len(rows))
    # cheap, and mostly enough where many rows have few proposals: even all drafts would not pay
    all_accepted = plain + sum(max(line[-1] for line in row_lines) for row_lines in lines)
    cheapest = min(costs[1:], default=costs[0])
    if all_accepted / (cheapest + draft_cost) <= CLEARLY * plain / (costs[0] + draft_cost):
        return 0, [plain]
    longest = max(len(line) for row in lines for line in row)
    lengths = range(min(longest, len(costs)))
    drafts = [0.0] * len(lengths)
    # of all rows together; a row without proposals takes a round for each token
    rounds_per_token = [float(len(rows) - len(lines))] * len(lengths)
    for row_lines in lines:
        padded = [line + [line[-1]] * (longest - len(line)) for line in row_lines]
        for draft_len, column in zip(lengths, zip(*padded, strict=True), strict=False):
            best = max(column)
            drafts[draft_len] += best
            rounds_per_token[draft_len] += 1 / (1 + best)
    if waiting:
        tokens = [len(rows) + total for total in drafts]
    else:
        tokens = [len(rows) ** 2 / total for total in rounds_per_token]
    rates = [count / (cost + draft_cost) for count, cost in zip(tokens, costs, strict=False)]
    draft_len = rates.index(max(rates))
    if rates[draft_len] <= CLEARLY * rates[0]:
        draft_len = 0
    return draft_len, tokens


def _best_proposal(row: Sequence[Expected], draft_len: int) -> Proposal | None:
    """Return the proposal with the most expected tokens at this draft length, cut to it."""
    if not draft_len or not row:
        return None
    best = max(row, key=lambda expected: expected.at(draft_len))
    if best.at(draft_len) <= 0:
        return None
    return best.proposal.cut(draft_len)


def _credit_drafter(
    gate: Gate,
    rows: Sequence[Sequence[Expected]],
    tokens: float,
    cost: float,
    costs: RoundCosts,
    waiting: bool,
) -> None:
    """Add to the gate what the drafter gains in a round of this cost, and the cost."""
    without_drafts = [
        [expected for expected in row if expected.proposal.source != "drafter"] for row in rows
    ]
    other_len, other_tokens = _best_draft_len(without_drafts, costs.steps, 0.0, waiting)
    # decoding without the drafter takes this long for as many tokens
    other_cost = tokens * costs.steps[other_len] / other_tokens[other_len]
    gate.add(other_cost - cost, cost)

"""Policy: decides what becomes of a step, by measured costs and by what drafts promise.

It alone says what a round verifies, whether the drafter runs, and where tap features go.
Deterministic: the same proposals, outcomes and times give the same decisions, so that a record can
be replayed. All costs are in plain steps, the time of a step that verifies one token per sequence.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from dflash_trt.engines import MAX_BUFFERED
from dflash_trt.speculation.costs import CostModel, RoundCosts, StepCosts
from dflash_trt.speculation.decision import Choice, Decision, Features, NextStep, SequenceView
from dflash_trt.speculation.estimator import AcceptanceEstimator
from dflash_trt.speculation.proposal import Proposal

# factor by which drafts must beat plain decoding: costs are higher than they look, and what looks
# best was often lucky
CLEARLY = 1.05
EXPLORING = 0.005  # fraction of time for drafts that are not expected to pay
FIRST_STEPS = 0.5  # plain steps for exploring at first
MOST_STEPS = 8.0  # that are saved up, and that one exploration counts for; more is noise


class Policy:
    """Decides what becomes of each step; a subclass says what it would like to do."""

    def __init__(self, draft_tokens: int) -> None:
        self.draft_tokens = draft_tokens  # requested of the drafter at most

    def decide(self, step: NextStep) -> Decision:
        """Return what a step verifies, whether the drafter runs, and what becomes of features."""
        plain = [None] * len(step.sequences)
        if not any(sequence.drafting for sequence in step.sequences):
            return Decision(plain, 0, Features.DROP)
        always = any(sequence.always_drafts for sequence in step.sequences)
        learns = not (always and self.draft_tokens)
        choice = self.choose(step) if learns else _all_drafts(step, self.draft_tokens)
        features = self._features(step, drafts=choice.draft_tokens > 0)
        draft_tokens = 0
        if features is Features.DRAFT:
            draft_tokens = choice.draft_tokens or self.draft_tokens
        return Decision(choice.proposals, draft_tokens, features, learns)

    def _features(self, step: NextStep, *, drafts: bool) -> Features:
        following = [sequence for sequence in step.sequences if sequence.follows]
        if not following or self.draft_tokens == 0:
            return Features.DROP
        if drafts:
            return Features.DRAFT
        if not self.keeps_features(max(sequence.budget for sequence in following)):
            return Features.DROP
        # without the drafter a prompt's cached blocks would serve no request that drafts
        if step.fills_cache:
            return Features.DRAFT
        longest = max(sequence.buffered for sequence in following) + step.new_tokens
        return Features.DRAFT if longest > MAX_BUFFERED else Features.KEEP

    def choose(self, step: NextStep) -> Choice:
        """Return what to verify, and whether the drafter should run."""
        raise NotImplementedError

    def keeps_features(self, budget: int) -> bool:
        """Return whether the drafter may run again for a sequence with `budget` tokens left."""
        return True

    def observe(self, proposal: Proposal, accepted: int) -> None:
        """Record how many drafts of a verified proposal were accepted."""

    def timed(self, verify: float, draft: float) -> None:
        """Record seconds of the last round: the drafter (0: not run), and the rest."""


def _all_drafts(step: NextStep, draft_tokens: int) -> Choice:
    """Choose each sequence's first proposal, cut to `draft_tokens`."""
    chosen: list[Proposal | None] = [None] * len(step.sequences)
    if draft_tokens:
        for index, sequence in enumerate(step.sequences):
            if sequence.proposals:
                chosen[index] = sequence.proposals[0].cut(draft_tokens)
    return Choice(chosen, draft_tokens)


class Fixed(Policy):
    """Policy that always verifies a chain of `draft_tokens`; 0: plain decoding."""

    def choose(self, step: NextStep) -> Choice:
        return _all_drafts(step, self.draft_tokens)


class Expected(NamedTuple):
    proposal: Proposal
    tokens: list[float]  # expected to be accepted of its first 0, 1, ..

    def at(self, draft_len: int) -> float:
        return self.tokens[min(draft_len, len(self.tokens) - 1)]


class Line(NamedTuple):
    """Expected accepted tokens at draft lengths 0, 1, .., of so many sequences."""

    accepted: Sequence[float]
    sequences: int = 1

    def tokens(self, draft_len: int) -> float:
        """Return the tokens of a round, the target's own one too."""
        return 1 + self.accepted[min(draft_len, len(self.accepted) - 1)]


class Best(NamedTuple):
    """The draft length with the most tokens per time."""

    draft_len: int
    rate: float  # tokens of a sequence in a plain step's time


class LastRound(NamedTuple):
    """The last round, for what is learned of it."""

    sequences: int = 0
    draft_len: int = 0
    context: int = 0
    sampled: bool = False
    drafted: bool = False  # the drafter ran
    explored: float = 0.0  # plain steps that it was charged for exploring


class Adaptive(Policy):
    """Policy that maximizes expected tokens per unit of time.

    The drafter runs where drafts as good as those that the texts had would pay. Where they would
    not, a small part of the time tries them again.
    """

    def __init__(self, profile: StepCosts, draft_tokens: int, max_drafts: int) -> None:
        super().__init__(draft_tokens)
        self._costs = CostModel(profile, max_drafts)
        self._estimator = AcceptanceEstimator(max_drafts)
        self._last = LastRound()
        self._streak = 0  # rounds in a row, before the last one, that ended with the drafter
        self._exploring = FIRST_STEPS  # plain steps that may be spent on exploring
        self._needed = 0.0  # plain steps that drafts are expected to lose; 0: they pay

    def decide(self, step: NextStep) -> Decision:
        decision = super().decide(step)
        if decision.learns and not step.is_prompt:
            self._note(step, decision)
        return decision

    def _note(self, step: NextStep, decision: Decision) -> None:
        self._streak = self._streak + 1 if self._last.drafted else 0
        drafted = decision.draft_tokens > 0
        explored = self._needed if drafted else 0.0
        self._exploring = min(self._exploring + EXPLORING, MOST_STEPS) - explored
        self._last = LastRound(
            len(step.sequences),
            decision.draft_len,
            step.context,
            step.sampled,
            drafted,
            explored,
        )

    def choose(self, step: NextStep) -> Choice:
        if step.is_prompt:
            drafts = self.draft_tokens > 0 and self._gain(step, 1.0) > CLEARLY
            return Choice([None], self.draft_tokens if drafts else 0)
        self._estimator.fade()
        n = len(step.sequences)
        costs = self._costs.costs(n, step.context, step.sampled)
        expected = [self._expect(sequence) for sequence in step.sequences]
        draft_cost = costs.draft if self._last.drafted else 0.0
        best = _best(expected, costs.steps, draft_cost, step.waiting)
        draft_len = best.draft_len
        if self._last.explored and any(expected):
            draft_len = max(draft_len, 1)  # or a wrong estimate is never corrected
        needs_plain = self._costs.needs_plain(n, step.sampled)  # to compare the costs of drafts
        if needs_plain:
            draft_len = 0
        proposals = [_best_proposal(sequence, draft_len) for sequence in expected]
        if self.draft_tokens == 0:
            return Choice(proposals, 0)
        without_drafts = [_without_drafts(choices) for choices in expected]
        others = _best(without_drafts, costs.steps, 0.0, step.waiting)
        drafts = self._drafter_runs(step, others.rate)
        if needs_plain and self._last.drafted:  # a plain step right after the drafter is slower
            drafts = False
        return Choice(proposals, self.draft_tokens if drafts else 0)

    def _drafter_runs(self, step: NextStep, other_rate: float) -> bool:
        """Return whether drafts pay, or are to be explored."""
        gain = self._gain(step, other_rate)
        if gain > CLEARLY:
            self._needed = 0.0
            return True
        costs = self._costs_of_all(step)
        none_accepted = costs.draft + costs.steps[1] - 1
        expected_loss = (costs.draft + costs.steps[1]) * (1 - gain / CLEARLY)
        self._needed = min(none_accepted, expected_loss)
        return self._exploring >= self._needed

    def _gain(self, step: NextStep, other_rate: float) -> float:
        """Return how much faster rounds with the drafter are expected to be than others.

        other_rate: tokens of a sequence in a plain step's time, without the drafter.
        """
        costs = self._costs_of_all(step)
        numbers = Counter(sequence.sampled for sequence in step.sequences if sequence.follows)
        not_followed = len(step.sequences) - numbers.total()
        numbers[step.sampled] += step.coming
        lines = [Line([0.0], not_followed)]
        for sampled, number in numbers.items():
            lines.append(Line(self._estimator.typical(sampled), number))
        tokens = _mean_tokens(lines, step.waiting)
        rates = [
            count / (cost + costs.draft) for count, cost in zip(tokens, costs.steps, strict=False)
        ]
        overrun = self._costs.overrun(len(step.sequences) + step.coming, step.sampled)
        return max(rates) / overrun / other_rate

    def _costs_of_all(self, step: NextStep) -> RoundCosts:
        """Return the costs of a round once those that are coming have joined."""
        n = len(step.sequences) + step.coming
        return self._costs.costs(n, step.context, step.sampled)

    def _expect(self, sequence: SequenceView) -> list[Expected]:
        expected = []
        for proposal in sequence.proposals:
            tokens = self._estimator.expected(proposal)
            if proposal.source == "drafter":
                self._estimator.note(tokens, proposal.sampled)
            expected.append(Expected(proposal, tokens))
        return expected

    def keeps_features(self, budget: int) -> bool:
        """Return whether the drafter pays, or may be explored within the budget."""
        return self._exploring + budget * EXPLORING >= self._needed

    def observe(self, proposal: Proposal, accepted: int) -> None:
        self._estimator.observe(proposal, accepted)

    def timed(self, verify: float, draft: float) -> None:
        last = self._last
        n, context = last.sequences, last.context
        self._costs.add(
            n, last.draft_len, context, verify, draft, self._streak, sampled=last.sampled
        )
        if last.explored:
            plain = self._costs.costs(n, context, last.sampled).plain_seconds
            more = max(draft / plain - last.explored, 0.0)
            self._exploring -= min(more, MOST_STEPS)


def _best(
    choices: Sequence[Sequence[Expected]], costs: Sequence[float], draft_cost: float, waiting: bool
) -> Best:
    """Return the draft length with the most tokens per time, of each sequence's best proposal."""
    lines = [_line(expected) for expected in choices if expected]
    lines.append(Line([0.0], len(choices) - len(lines)))
    tokens = _mean_tokens(lines, waiting)
    rates = [count / (cost + draft_cost) for count, cost in zip(tokens, costs, strict=False)]
    draft_len = rates.index(max(rates))
    if rates[draft_len] <= CLEARLY * rates[0]:
        draft_len = 0
    return Best(draft_len, rates[draft_len])


def _line(choices: Sequence[Expected]) -> Line:
    """Return what the best of a sequence's proposals brings at each draft length."""
    if len(choices) == 1:
        return Line(choices[0].tokens)
    longest = max(len(expected.tokens) for expected in choices)
    return Line([max(expected.at(length) for expected in choices) for length in range(longest)])


def _mean_tokens(lines: Sequence[Line], waiting: bool) -> list[float]:
    """Return the tokens of a sequence in a round, by the draft length.

    If requests wait for a slot, it is their mean, else their harmonic mean: the mean time for a
    token counts. A round that hurries some sequences holds up the others, which then go on without
    company, at a step's whole cost.
    """
    n = sum(line.sequences for line in lines)
    longest = max(len(line.accepted) for line in lines)
    means = []
    for draft_len in range(longest):
        if waiting:
            tokens = sum(line.sequences * line.tokens(draft_len) for line in lines)
            means.append(tokens / n)
        else:
            rounds = sum(line.sequences / line.tokens(draft_len) for line in lines)
            means.append(n / rounds)
    return means


def _without_drafts(choices: Sequence[Expected]) -> list[Expected]:
    return [expected for expected in choices if expected.proposal.source != "drafter"]


def _best_proposal(choices: Sequence[Expected], draft_len: int) -> Proposal | None:
    """Return the proposal with the most expected tokens at this draft length, cut to it."""
    if not draft_len or not choices:
        return None
    best = max(choices, key=lambda expected: expected.at(draft_len))
    if best.at(draft_len) <= 0:
        return None
    return best.proposal.cut(draft_len)

"""What each round verifies, by measured costs: nothing, a chain, tokens looked up, or a tree.

Pure: the same offers and outcomes lead to the same choices, so that a record can be replayed. All
costs are in plain steps, the time of a step that verifies nothing but one token of each sequence.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

from dflash_trt.decoding.speculation.chances import MEMORY, PRIOR, Chances
from dflash_trt.decoding.speculation.evidence import (
    CHOICE_SHARE,
    FIRST_STAKE,
    RECENT,
    STAKE,
    Rests,
    Worth,
)
from dflash_trt.decoding.speculation.offers import Choice, Proposal, Row
from dflash_trt.decoding.speculation.timings import StepCosts, Timings
from dflash_trt.decoding.speculation.tree import depths

CLEARLY = 1.02  # how much more drafts must promise than plain decoding
SURE = 0.75  # share of its copied tokens that a text keeps which repeats itself
LITTLE_LOST = 0.25  # plain steps, where a plain step is taken in place of drafts
PROBING = 0.005  # share of the time that the drafter may take where it does not pay
PROBING_SMALL = 0.002  # the same of a small model, where holding features for it takes time, too
HOPE = 0.75  # that a draft is accepted if all before it were, before any were seen


class Policy(Protocol):
    """Chooses before each round, and is told of each row after it."""

    draft_tokens: int  # how many the drafter is asked for at most, and behind a prompt

    def choose(self, rows: Sequence[Row], context: int, feed: bool = False) -> Choice:
        """context: tokens of a row, on average; feed: whether the drafter has to run."""

    def prefill(self, n: int, drawn: bool) -> bool:
        """Whether the drafter should run behind a prompt's chunk; n: sequences there will be."""

    def prefilled(self, n: int, drawn: bool, draft: float) -> None:
        """Seconds that the drafter took where it did."""

    def holds(self, budget: int) -> bool:
        """Whether the drafter may have use for a sequence that has so many tokens to come."""

    def observe(self, proposal: Proposal, accepted: int) -> None:
        """How many drafts of a verified proposal were kept."""

    def missed(self, proposal: Proposal, token: int) -> None:
        """The first token that was committed in place of an offer that was not taken."""

    def timed(self, verify: float, draft: float, choosing: float) -> None:
        """Seconds of a round as it was chosen last: of the drafter (0: it did not run), and of all
        the rest; and of the choice itself. Of plain rounds that follow a choice it is told the
        last."""


class Fixed:
    """Always a chain of so many drafts, or plain decoding with 0 of them."""

    def __init__(self, draft_tokens: int) -> None:
        self.draft_tokens = draft_tokens

    def choose(self, rows: Sequence[Row], context: int, feed: bool = False) -> Choice:
        """See `Policy`."""
        taken = [row.offers[0] if row.offers else None for row in rows]
        return Choice(taken, self.draft_tokens)

    def prefill(self, n: int, drawn: bool) -> bool:
        """See `Policy`."""
        return self.draft_tokens > 0

    def prefilled(self, n: int, drawn: bool, draft: float) -> None:
        """See `Policy`."""

    def holds(self, budget: int) -> bool:
        """See `Policy`."""
        return True

    def observe(self, proposal: Proposal, accepted: int) -> None:
        """See `Policy`."""

    def missed(self, proposal: Proposal, token: int) -> None:
        """See `Policy`."""

    def timed(self, verify: float, draft: float, choosing: float) -> None:
        """See `Policy`."""


class Adaptive:
    """The width and the proposals that promise the most tokens in a time.

    A round of n rows commits n tokens and the drafts that are accepted. Whether the drafter runs is
    decided by what rounds behind it promised, beside what they had without it.
    """

    def __init__(self, costs: StepCosts, draft_tokens: int, most: int) -> None:
        """most: drafts of a row that a round may verify."""
        self._timings = Timings(costs, most)
        self.draft_tokens = draft_tokens
        self._last = (0, 0, 0)  # rows, width and context of the last round
        self._chances = Chances(most)
        self._promised = {drawn: _hopes(most) for drawn in (False, True)}
        self._seen = dict.fromkeys((False, True), PRIOR)  # how many that is the mean of
        self._worth: dict[Situation, Worth] = {}
        self._drafted_in: Situation | None = None  # the last round, if the drafter ran behind it
        self._streak = 0  # rounds before this one, behind all of which it ran
        self._used: dict[int, float] = {}  # how deep its drafts were verified of late
        self._idle = 0  # rounds since it did
        self._probing = False  # whether it did for nothing but to see whether it pays again
        self._small = False  # whether choosing takes its share of the last round's time
        self._pause = 0.0  # rounds between two in which it is tried where it does not pay
        self._rests = Rests()

    def choose(self, rows: Sequence[Row], context: int, feed: bool = False) -> Choice:
        """See `Policy`."""
        n = len(rows)
        choosing = self._timings.choice(n, context)
        before, self._drafted_in = self._drafted_in, None
        self._streak = self._streak + 1 if before else 0
        steps, draft = self._timings.costs(n, context, drafting=before is not None)
        taken: list[Proposal | None] = [None] * n
        width, tokens, cost = 0, [float(n)], 1.0
        if any(row.offers for row in rows):
            expected = [[(x, self._chances.expected(x)) for x in row.offers] for row in rows]
            width, tokens = _best(expected, steps, draft if before else 0.0)
            if before:
                self._judge(before, expected, tokens[width], steps[width] + draft, context)
            if not width and self._probing:
                width = 1  # else what is believed of drafts could never be found wrong
        lacking = self._timings.lack_plain(n, cheap=tokens[width] / n - steps[width] < LITTLE_LOST)
        if lacking:
            width = 0  # all costs are in plain steps: some have to be seen
        if width:
            taken = [_taken(offers, width) for offers in expected]
            cost = steps[width] + (draft if before else 0.0)
        asked = self._asked(n, taken)
        situation = self._situation(rows, taken)
        lost = any(row.lost for row in rows)
        pays = self._pays(situation, n, context, (steps, draft)) and not lost
        self._small = choosing > CHOICE_SHARE
        probing = PROBING_SMALL if self._small else PROBING
        self._pause = self._timings.waking(n, context) / probing
        self._probing = not (pays or lost) and self._idle >= self._pause
        # behind the drafter a plain step takes longer
        runs = feed or ((pays or self._probing) and not (lacking and before))
        if runs:
            self._drafted_in, self._idle = None if lost else situation, -1
        self._last = n, width, context
        rest = self._rests.after(n, cost, choosing, plain=not (width or runs))
        self._idle += 1 + rest
        return Choice(taken, asked if runs else 0, rest)

    def prefill(self, n: int, drawn: bool) -> bool:
        """See `Policy`."""
        return self._worth_in(_behind_prompt(n, drawn), n, 0).pays

    def prefilled(self, n: int, drawn: bool, draft: float) -> None:
        """See `Policy`."""
        self._worth_in(_behind_prompt(n, drawn), n, 0).owe(draft / self._timings.plain(n, 0))

    def holds(self, budget: int) -> bool:
        """See `Policy`. Not where drafting pays in no situation, and the sequence will have ended
        before it is tried again. Of a model so small that this costs something, situations with
        other numbers of sequences do not count, and none is held before it is to be tried."""
        n = self._last[0]
        if not self._worth or not n:
            return True
        for (at, *_), worth in self._worth.items():
            if worth.pays and (at == n.bit_length() or not self._small):
                return True
        return self._idle + (0 if self._small else budget) >= self._pause

    def observe(self, proposal: Proposal, accepted: int) -> None:
        """See `Policy`."""
        self._rests.kept += accepted
        self._chances.observe(proposal, accepted)

    def missed(self, proposal: Proposal, token: int) -> None:
        """See `Policy`."""
        self._chances.missed(proposal, token)

    def timed(self, verify: float, draft: float, choosing: float) -> None:
        """See `Policy`."""
        self._timings.add(self._last, self._streak, verify, draft, choosing)

    def _judge(
        self,
        situation: "Situation",
        rows: "Sequence[Sequence[Expected]]",
        tokens: float,
        cost: float,
        context: int,
    ) -> None:
        """What the drafter behind a round is worth: these tokens at this cost, or none of its."""
        steps, _ = self._timings.costs(len(rows), context, drafting=False)
        others = [[x for x in offers if x[0].source != "drafter"] for offers in rows]
        width, without = _best(others, steps, 0.0)
        self._worth_in(situation, len(rows), context).add(
            tokens * steps[width] / without[width] - cost, cost
        )
        self._remember(rows)

    def _asked(self, n: int, taken: Sequence[Proposal | None]) -> int:
        """One draft more than is verified of late: each costs a row of the head's product."""
        at = n.bit_length()
        drafted = [x for x in taken if x and x.source == "drafter"]
        if drafted:
            deepest = max(max(depths(tuple(x.parents))) for x in drafted)
            self._used[at] = max(deepest, RECENT * self._used.get(at, 0.0))
        return min(1 + round(self._used.get(at, self.draft_tokens)), self.draft_tokens)

    def _worth_in(self, situation: "Situation", n: int, context: int) -> Worth:
        """What drafting brings in a situation; at first what it should, by what drafts promised."""
        if situation not in self._worth:
            should = self._should(situation, *self._timings.costs(n, context, drafting=True))
            first = max(FIRST_STAKE * (should - 1), STAKE)
            self._worth[situation] = Worth(should > 1, STAKE, first)
        return self._worth[situation]

    def _pays(
        self, situation: "Situation", n: int, context: int, costs: tuple[list[float], float]
    ) -> bool:
        """Whether the drafter should run; found out anew where costs are clearly less than then."""
        worth, longest = self._worth_in(situation, n, context), costs[0][self.draft_tokens]
        if worth.cheaper(longest) and self._should(situation, *costs) > 1:
            worth.try_again(longest)
            self._timings.forget_drafting(n)
        return worth.pays

    def _should(self, situation: "Situation", steps: Sequence[float], draft: float) -> float:
        """Tokens of a row in a plain step's time, by what drafts promised, at these costs; none
        where rows repeat themselves, as copies are as good there."""
        _, repeats, drawn = situation
        lines = zip(steps, self._promised[drawn > 0], strict=True)
        return 0.0 if repeats else max((1 + tokens) / (step + draft) for step, tokens in lines)

    def _situation(self, rows: Sequence[Row], taken: Sequence[Proposal | None]) -> "Situation":
        drawn = [row.drawn for row in rows]
        return len(rows).bit_length(), all(map(self._repeats, taken)), any(drawn) + all(drawn)

    def _repeats(self, proposal: Proposal | None) -> bool:
        """Whether a row repeats itself: behind that there is more to be looked up."""
        if proposal is None or proposal.source == "drafter":
            return False
        return self._chances.expected(proposal)[-1] >= SURE * len(proposal.tokens)

    def _remember(self, rows: "Sequence[Sequence[Expected]]") -> None:
        """What drafts promise by and large, by their number."""
        for offers in rows:
            for proposal, line in offers:
                if proposal.source == "drafter":
                    means = self._promised[proposal.drawn]
                    self._seen[proposal.drawn] += 1
                    share = max(1 - MEMORY, 1 / self._seen[proposal.drawn])
                    longer = _to(line, len(means))
                    means[:] = [m + (x - m) * share for m, x in zip(means, longer, strict=True)]


Expected = tuple[Proposal, list[float]]
# in which drafting is worth much the same: about how many rows there are; whether all of them
# repeat themselves; and whether none, some or all are drawn
Situation = tuple[int, bool, int]


def _best(
    rows: Sequence[Sequence[Expected]], steps: Sequence[float], more: float
) -> tuple[int, list[float]]:
    """The number of drafts with the most tokens in a time, and the tokens with each number.

    steps: costs by drafts; more: what else a round costs.
    """
    n = len(rows)
    longest = max((len(line) for offers in rows for _, line in offers), default=1)
    lines = [_better([_to(line, longest) for _, line in offers]) for offers in rows if offers]
    tokens = [float(n + x) for x in map(sum, zip(*lines, strict=True))][: len(steps)] or [float(n)]
    rates = [promised / (step + more) for promised, step in zip(tokens, steps, strict=False)]
    width = rates.index(max(rates))
    if rates[width] <= CLEARLY * rates[0]:
        width = 0
    return width, tokens


def _better(lines: Sequence[list[float]]) -> list[float]:
    """Of one row, at each width."""
    return [*map(max, *lines)] if len(lines) > 1 else lines[0]


def _to(line: list[float], length: int) -> list[float]:
    """As long as others: more drafts than there are bring nothing more."""
    return line if len(line) == length else line + [line[-1]] * (length - len(line))


def _hopes(most: int) -> list[float]:
    """How many of 0, 1, .. drafts are accepted, before any were seen."""
    return [0.0, *accumulate(HOPE**k for k in range(1, most + 1))]


def _at(line: Sequence[float], width: int) -> float:
    return line[width] if width < len(line) else line[-1]


def _taken(offers: Sequence[Expected], width: int) -> Proposal | None:
    proposal, line = max(offers, key=lambda x: _at(x[1], width), default=(None, [0.0]))
    return proposal.cut(width) if proposal and _at(line, width) > 0 else None


def _behind_prompt(n: int, drawn: bool) -> Situation:
    return n.bit_length(), False, 2 * drawn

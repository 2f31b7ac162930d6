"""Estimates of how many tokens of a proposal will be accepted, from the outcomes of others."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import mul

from dflash_trt.speculation.proposal import Proposal

MEMORY = 0.98  # decay per outcome
FADING = 0.99  # decay per round of what is typical
PRIOR = 4.0  # weight of the prior, in outcomes
MATCHES = (1, 2, 3, 5, 8)  # buckets of match length: the shortest of each
# chance that a new drafter's draft is accepted, given that those before it were
FIRST_GUESS = 0.7
# prior probability that a copied token is right, for greedy texts and sampled ones
CHANCES = (0.48, 0.69, 0.74, 0.87, 0.95)
SAMPLED_CHANCES = (0.33, 0.55, 0.63, 0.74, 0.9)


class AcceptanceEstimator:
    """Acceptance by decayed counts per source, position, sampling and, of copies, match length."""

    def __init__(self, max_drafts: int) -> None:
        self._max_drafts = max_drafts  # per sequence in a round
        self._drafted = defaultdict[tuple[str, bool, bool], _Calibration](
            lambda: _Calibration(max_drafts)
        )
        self._copied: dict[tuple[bool, int], _CopyAcceptance] = {}
        self._typical = defaultdict[bool, _Typical](lambda: _Typical(max_drafts))

    def typical(self, sampled: bool) -> list[float]:
        """Return how many of the drafter's first 0, 1, .. drafts are accepted on average."""
        return self._typical[sampled].expected()

    def note(self, expected: Sequence[float], sampled: bool) -> None:
        """Add what a proposal of the drafter promises, as `expected` returns it, to the average."""
        self._typical[sampled].add(expected)

    def fade(self) -> None:
        """Let a round pass: what is typical changes, even while nothing is drafted."""
        for typical in self._typical.values():
            typical.fade()

    def expected(self, proposal: Proposal) -> list[float]:
        """Return the expected accepted tokens among the first 0, 1, .. drafts."""
        if proposal.source == "lookup":
            return self._copies(proposal).expected()[: len(proposal.tokens) + 1]
        return self._drafted[_bucket(proposal)].expected(proposal.values)

    def observe(self, proposal: Proposal, accepted: int) -> None:
        if proposal.source == "lookup":
            self._copies(proposal).observe(len(proposal.tokens), accepted)
        else:
            self._drafted[_bucket(proposal)].observe(proposal.values, accepted)

    def _copies(self, proposal: Proposal) -> "_CopyAcceptance":
        bucket = bisect_right(MATCHES, proposal.match) - 1
        key = proposal.sampled, bucket
        if key not in self._copied:
            chances = SAMPLED_CHANCES if proposal.sampled else CHANCES
            self._copied[key] = _CopyAcceptance(self._max_drafts, chances[bucket])
        return self._copied[key]


def _bucket(proposal: Proposal) -> tuple[str, bool, bool]:
    return proposal.source, proposal.sampled, bool(proposal.forced)  # under a grammar


class _CopyAcceptance:
    def __init__(self, count: int, chance: float) -> None:
        self._reached = [PRIOR] * count  # token j was reached: all before it were accepted
        self._accepted = [PRIOR * chance] * count
        self._expected = self._sum_up()

    def expected(self) -> list[float]:
        return self._expected

    def observe(self, copied: int, accepted: int) -> None:
        for j in range(min(accepted + 1, copied)):
            self._reached[j] = self._reached[j] * MEMORY + 1.0
            self._accepted[j] = self._accepted[j] * MEMORY + (j < accepted)
        self._expected = self._sum_up()

    def _sum_up(self) -> list[float]:
        counts = zip(self._accepted, self._reached, strict=True)
        chances = (accepted / reached for accepted, reached in counts)
        return [*accumulate(accumulate(chances, mul), initial=0.0)]


class _Typical:
    """Mean of the expected accepted tokens at each depth, from a guess on."""

    def __init__(self, max_depth: int) -> None:
        self._sums = [PRIOR * FIRST_GUESS**depth for depth in range(1, max_depth + 1)]
        self._weight = PRIOR
        self._mean = self._sum_up()

    def expected(self) -> list[float]:
        return self._mean

    def add(self, expected: Sequence[float]) -> None:
        """Add a proposal's line; depths beyond it count as never accepted."""
        gains = [after - before for before, after in pairwise(expected)]
        gains += [0.0] * (len(self._sums) - len(gains))
        self._sums = [total + gain for total, gain in zip(self._sums, gains, strict=True)]
        self._weight += 1.0
        self._mean = self._sum_up()

    def fade(self) -> None:
        if self._weight > 1:
            self._weight *= FADING
            self._sums = [total * FADING for total in self._sums]

    def _sum_up(self) -> list[float]:
        return [*accumulate((total / self._weight for total in self._sums), initial=0.0)]


class _Calibration:
    """Ratio of accepted drafts to the drafter's probabilities, by depth.

    A depth with few outcomes takes the ratio of the depth before it times that of the first, so
    that depths seldom verified still get a usable value.
    """

    def __init__(self, max_depth: int) -> None:
        self._predicted = [0.0] * (max_depth + 1)
        self._accepted = [0.0] * (max_depth + 1)
        self._ratios = [1.0] * (max_depth + 1)

    def expected(self, values: Sequence[float]) -> list[float]:
        chances = (min(chance, 1.0) for chance in map(mul, values, self._ratios[1:]))
        return [*accumulate(chances, initial=0.0)]

    def observe(self, values: Sequence[float], accepted: int) -> None:
        missing = len(self._predicted) - 1 - len(values)
        predicted = [0.0, *values, *[0.0] * missing]
        ratio = 1.0
        first = 1.0
        for depth in range(1, len(predicted)):
            self._predicted[depth] = self._predicted[depth] * MEMORY + predicted[depth]
            self._accepted[depth] = self._accepted[depth] * MEMORY + (depth <= accepted)
            before = PRIOR * ratio * first
            ratio = (self._accepted[depth] + before) / (self._predicted[depth] + PRIOR)
            self._ratios[depth] = ratio
            first = self._ratios[1]

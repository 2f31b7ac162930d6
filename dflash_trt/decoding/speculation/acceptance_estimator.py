"""How many tokens of a proposal the target may be expected to keep, by what became of others."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from dflash_trt.decoding.speculation.proposal import Proposal
from dflash_trt.decoding.speculation.tree import depths

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

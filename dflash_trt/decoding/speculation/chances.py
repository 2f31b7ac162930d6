"""What may be expected of proposals, by what became of others."""

from collections.abc import Sequence
from itertools import accumulate, product
from operator import mul

from dflash_trt.decoding.speculation.lookup import Record
from dflash_trt.decoding.speculation.offers import Proposal
from dflash_trt.decoding.speculation.tree import depths

MEMORY = 0.99  # weight of the past at each outcome: about the last 100 count
PRIOR = 3.0  # drafts that are taken to be as the drafter says, before any were seen


class Chances:
    """Of those with a temperature and without apart; of copies also whether the drafter says
    otherwise."""

    def __init__(self, most: int) -> None:
        """most: drafts of a row that a round may verify."""
        both = (False, True)
        self._depths = {drawn: Depths(most) for drawn in both}
        self._records = {
            (drawn, doubted): Record(most, drawn, doubted)
            for drawn, doubted in product(both, repeat=2)
        }

    def expected(self, proposal: Proposal) -> list[float]:
        """How many of its first 0, 1, .. drafts are accepted."""
        if proposal.source == "lookup":
            return self._record(proposal).expected(proposal.match, len(proposal.tokens))
        return self._depths[proposal.drawn].expected(proposal.values, proposal.parents)

    def observe(self, proposal: Proposal, accepted: int) -> None:
        """How many drafts of a verified proposal were kept."""
        if proposal.source == "lookup":
            self._record(proposal).observe(proposal.match, len(proposal.tokens), accepted)
        else:
            self._depths[proposal.drawn].observe(proposal.values, proposal.parents, accepted)

    def missed(self, proposal: Proposal, token: int) -> None:
        """The first token that was committed in place of an offer that was not taken.

        Else copies would never be found to be worse than they promise while there are better
        drafts, which would then seem to bring too little. Later tokens are known where text is
        easy: they would promise too much.
        """
        if proposal.source == "lookup":
            right = proposal.tokens[0] == token
            self._record(proposal).observe(proposal.match, 1, int(right))

    def _record(self, proposal: Proposal) -> Record:
        return self._records[proposal.drawn, proposal.doubted]


class Depths:
    """How the drafter's probabilities and what is accepted compare, by depth.

    What is not known of a depth is taken to be as before it: else bad luck far down a chain would
    end there whatever could teach better.
    """

    def __init__(self, most: int) -> None:
        self._said = [0.0] * (most + 1)
        self._kept = [0.0] * (most + 1)
        self._ratios = [1.0] * (most + 1)

    def expected(self, values: Sequence[float], parents: Sequence[int]) -> list[float]:
        """How many of the first 0, 1, .. drafts are accepted, by the drafter's word for each."""
        ratios = map(self._ratios.__getitem__, depths(tuple(parents))[1:])
        chances = (min(chance, 1.0) for chance in map(mul, values, ratios))
        return [*accumulate(chances, initial=0.0)]

    def observe(self, values: Sequence[float], parents: Sequence[int], accepted: int) -> None:
        """Learn from how many were kept."""
        said = [0.0] * len(self._said)
        at = depths(tuple(parents))[1:]
        for depth, value in zip(at, values, strict=True):
            said[depth] += value
        ratio, step = 1.0, 1.0
        for depth in range(1, len(said)):
            self._said[depth] = self._said[depth] * MEMORY + said[depth]
            self._kept[depth] = self._kept[depth] * MEMORY + (depth <= accepted)
            ratio = (self._kept[depth] + PRIOR * ratio * step) / (self._said[depth] + PRIOR)
            self._ratios[depth] = ratio
            if depth == 1:
                step = ratio

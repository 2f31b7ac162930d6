"""What may be verified in a round, and what is."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

SOURCES = ("target", "drafter", "lookup", "prompt")  # who wrote a token
VERIFIED = ("plain", "chain", "tree", "lookup")  # of a row in a round: no drafts, or which kind


class Proposal(NamedTuple):
    """Drafts for one sequence; the first ones of them are a proposal, too."""

    source: Literal["drafter", "lookup"]
    tokens: Sequence[int]
    parents: Sequence[int]  # as in `tree.Tree`
    values: Sequence[float] = ()  # that each is accepted, by the drafter's word
    drawn: bool = False  # for a request that has a temperature
    match: int = 0  # tokens alike before what was looked up
    doubted: bool = False  # whether the drafter says otherwise than what was looked up

    def cut(self, most: int) -> "Proposal":
        """The first drafts of it."""
        return self._replace(
            tokens=self.tokens[:most], parents=self.parents[:most], values=self.values[:most]
        )

    @property
    def is_chain(self) -> bool:
        return isinstance(self.parents, range) or self.parents == [*range(len(self.parents))]

    @property
    def kind(self) -> str:
        """One of `VERIFIED`."""
        if self.source == "lookup":
            return "lookup"
        return "chain" if self.is_chain else "tree"


class Choice(NamedTuple):
    """What a round does."""

    taken: Sequence[Proposal | None]  # what is verified of each row
    draft: int  # how many drafts the drafter is asked for at its end; 0: it does not run
    rest: int = 0  # rounds to follow that do nothing else than plain decoding: none to be chosen

    @property
    def width(self) -> int:
        """Drafts of a row at most."""
        return max((len(each.tokens) for each in self.taken if each), default=0)


class Row(NamedTuple):
    """What there is to choose from for one sequence."""

    offers: Sequence[Proposal]
    drawn: bool  # whether its request has a temperature
    lost: bool = False  # whether the drafter has not all of its features

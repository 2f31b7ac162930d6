"""What may be verified in a round, and what is."""

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

SOURCES = ("target", "drafter", "lookup", "prompt", "grammar")  # who wrote a token
# of a row in a round: no drafts, or which kind
VERIFIED = ("plain", "chain", "tree", "lookup", "grammar")


class Proposal(NamedTuple):
    """Draft tokens for one sequence; the first ones of them are a proposal, too."""

    source: Literal["drafter", "lookup", "grammar"]
    tokens: Sequence[int]
    parents: Sequence[int]  # as in `tree.Tree`
    values: Sequence[float] = ()  # that each is accepted, according to the drafter
    sampled: bool = False  # for a request that has a temperature
    match: int = 0  # tokens alike before what was looked up
    contradicted: bool = False  # whether the drafter's first token is another
    forced: Sequence[bool] = ()  # which of them the grammar forces; empty without a grammar

    def cut(self, length: int) -> "Proposal":
        """The first `length` draft tokens of it."""
        return self._replace(
            tokens=self.tokens[:length],
            parents=self.parents[:length],
            values=self.values[:length],
            forced=self.forced[:length],
        )

    def sources(self, nodes: Iterable[int]) -> list[int]:
        """Who proposed these of its drafts (1: the first), by place in `SOURCES`."""
        own, grammar = SOURCES.index(self.source), SOURCES.index("grammar")
        return [grammar if self.forced and self.forced[node - 1] else own for node in nodes]

    @property
    def kind(self) -> str:
        """One of `VERIFIED`."""
        if self.source != "drafter":
            return self.source
        return "chain" if self.is_chain else "tree"

    @property
    def is_chain(self) -> bool:
        return isinstance(self.parents, range) or self.parents == [*range(len(self.parents))]


class Row(NamedTuple):
    """What there is to choose from for one sequence."""

    proposals: Sequence[Proposal]
    sampled: bool  # whether its request has a temperature
    out_of_sync: bool = False  # whether the drafter lacks features of it, and drafts no more


class StepPlan(NamedTuple):
    """What a round does."""

    chosen: Sequence[Proposal | None]  # what is verified of each row
    draft_tokens: int  # how many the drafter is asked for afterwards; 0: it does not run
    rest: int = 0  # rounds to follow that are plain decoding, without another plan

    @property
    def width(self) -> int:
        """Draft tokens of a row at most."""
        return max((len(each.tokens) for each in self.chosen if each), default=0)

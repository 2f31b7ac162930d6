"""Proposals: drafts of one sequence."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

SOURCES = ("target", "drafter", "lookup", "prompt", "grammar")  # origin of a token
VERIFIED = ("plain", "drafts", "lookup", "grammar")  # what a round verified for a sequence


class Proposal(NamedTuple):
    """Draft tokens for one sequence; any prefix of them is a proposal too."""

    source: Literal["drafter", "lookup", "grammar"]
    tokens: Sequence[int]
    values: Sequence[float] = ()  # the drafter's probability that each is accepted
    sampled: bool = False  # the request has a temperature
    match: int = 0  # length of the n-gram match
    forced: Sequence[bool] = ()  # which tokens the grammar forces; empty without one

    def cut(self, length: int) -> "Proposal":
        return self._replace(
            tokens=self.tokens[:length], values=self.values[:length], forced=self.forced[:length]
        )

    @property
    def sources(self) -> list[int]:
        """The source of each draft, as an index in `SOURCES`."""
        source = SOURCES.index(self.source)
        if not any(self.forced):
            return [source] * len(self.tokens)
        grammar = SOURCES.index("grammar")
        return [grammar if forced else source for forced in self.forced]

    @property
    def kind(self) -> str:
        """What a round verifies with it, one of `VERIFIED`."""
        return "drafts" if self.source == "drafter" else self.source

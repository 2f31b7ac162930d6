"""Costs and proposals that are made up, for the policy's tests."""

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_trt.speculation import Choice, Decision, Proposal, SequenceView

MOST = 7  # drafts of a row
SECOND = 1e-2  # of a plain step


@dataclass
class Costs:
    """Costs in plain steps: `steps` of a round by its drafts, and the drafter's."""

    steps: Sequence[float]
    drafter: float = 0.0
    sampled: float = 0.0  # what sampling adds

    def verify(self, n: int, width: int, context: int) -> float:
        return SECOND * self.steps[min(width, len(self.steps)) - 1]

    def draft(self, n: int, context: int) -> float:
        return SECOND * self.drafter

    def sampling(self, n: int) -> float:
        return SECOND * self.sampled


def linear(token: float) -> list[float]:
    return [1 + token * drafts for drafts in range(MOST + 1)]


def chain(values: Sequence[float]) -> Proposal:
    return Proposal("drafter", [5] * len(values), values)


def looked_up(match: int, count: int = MOST) -> Proposal:
    return Proposal("lookup", [6] * count, match=match)


def views(*proposals: Proposal) -> list[SequenceView]:
    """Return sequences with a proposal each, and many tokens to go."""
    return [SequenceView([each], budget=1000) for each in proposals]


def draft_lens(decision: Choice | Decision) -> list[int]:
    return [len(each.tokens) if each else 0 for each in decision.proposals]

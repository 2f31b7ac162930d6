"""What a step is decided from, and the decision: one record that the scheduler executes."""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from dflash_trt.speculation.proposal import Proposal


class Features(Enum):
    """What happens to the tap features of a step's tokens."""

    KEEP = 0  # they are buffered
    # the drafter takes them in, after buffered ones, and drafts; if no text goes on: KEEP
    DRAFT = 1
    DROP = 2  # these and all buffered ones are dropped: these sequences stop drafting


class SequenceView(NamedTuple):
    """What a decision depends on of one sequence."""

    proposals: Sequence[Proposal] = ()  # what may be verified next
    sampled: bool = False  # its request has a temperature
    drafting: bool = True  # its request allows drafts
    always_drafts: bool = False  # its request wants drafts in each round, whatever they cost
    follows: bool = True  # the drafter knows the text so far, or its features are buffered
    budget: int = 1  # tokens still to generate
    buffered: int = 0  # tokens whose features are buffered


class NextStep(NamedTuple):
    """A step before it runs: a round, or a chunk of a prompt."""

    sequences: Sequence[SequenceView]
    context: int = 0  # mean tokens of a sequence
    new_tokens: int = 0  # whose features the step brings, of a sequence at most
    coming: int = 0  # sequences that will join, even if none of these ends
    waiting: bool = False  # whether requests wait for a slot
    is_prompt: bool = False
    fills_cache: bool = False  # a prompt ends, and is stored in the prefix cache

    @property
    def sampled(self) -> bool:
        return any(sequence.sampled for sequence in self.sequences)


class Choice(NamedTuple):
    """What a policy would like to do."""

    proposals: Sequence[Proposal | None]  # to verify of each sequence
    draft_tokens: int  # requested of the drafter afterwards; 0: it need not run


class Decision(NamedTuple):
    """What a step does."""

    proposals: Sequence[Proposal | None]  # to verify of each sequence
    draft_tokens: int  # requested of the drafter afterwards; 0: it does not run
    features: Features
    learns: bool = False  # the policy chose, and wants to know the outcome

    @property
    def draft_len(self) -> int:
        """The most drafts of a sequence."""
        return max((len(proposal.tokens) for proposal in self.proposals if proposal), default=0)

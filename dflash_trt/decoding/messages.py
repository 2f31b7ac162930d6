"""What a round is asked and what it answers. `packing` turns it into tensors for the ensemble."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dflash_trt.decoding.arrays import FeatureArray, Float32, Int32, Int64
from dflash_trt.decoding.logits_processor import PLAIN_GREEDY, LogitsProcessor
from dflash_trt.engines import FIRST_BLOCK
from dflash_trt.speculation import Features


@dataclass(slots=True, frozen=True)
class Copy:
    """A copy of KV entries that a round begins with.

    Source and destination are slots, or from `FIRST_BLOCK` on blocks of the prefix cache.
    Destination None frees the source: its sequence has ended, or the block is dropped.
    """

    source: int
    destination: int | None
    tokens: int
    start: int  # position of the first token

    @property
    def frees_slot(self) -> bool:
        """Whether a slot is freed: then there is nothing to copy."""
        return self.destination is None and self.source < FIRST_BLOCK


@dataclass(slots=True)
class RoundSequence:
    """What one sequence brings to a round: known tokens, then drafts.

    The known tokens are the anchor, or a chunk of a prompt: prefilling is verifying a prompt.
    """

    tokens: Sequence[int]
    known: int
    position: int  # of the first token
    budget: int  # tokens left, counting the one that the target adds; 0: the prompt goes on
    # drafts accepted in the last round, which a hybrid's states do not hold yet
    replayed: int = 0
    processor: LogitsProcessor = PLAIN_GREEDY
    history: Sequence[int] = ()  # the tokens before `tokens`, if the processor needs them
    # bit masks `[vocab / 32]` of the tokens that a grammar allows after the anchor and each draft;
    # None, or no masks at all: any token
    masks: Sequence[Int32 | None] = ()
    next_token: int | None = None  # after a chunk whose log-probabilities are requested
    follows: bool = True  # whether the drafter knows this text so far; else it gets no drafts

    @property
    def drafts(self) -> Sequence[int]:
        return self.tokens[self.known :]

    @property
    def prompt_goes_on(self) -> bool:
        """Whether more of the prompt follows: then the text gets no token yet."""
        return self.budget == 0

    @property
    def scores_prompt(self) -> bool:
        """Whether the log-probabilities of all tokens are requested, not only of new ones."""
        return self.processor.scores_prompt(self.position)


@dataclass(slots=True)
class Round:
    """Tokens to verify for sequences in adjacent slots; of a hybrid all know as many."""

    first_slot: int
    sequences: Sequence[RoundSequence]
    features: Features
    draft_tokens: int = 0  # to be drafted for each sequence afterwards, with `Features.DRAFT`
    candidates: int = 1  # to return of each of them
    copies: Sequence[Copy] = ()  # to be done first, in this order

    @property
    def width(self) -> int:
        """The most tokens of a sequence: known ones and drafts."""
        return max(len(sequence.tokens) for sequence in self.sequences)

    @property
    def needs_drafter(self) -> bool:
        """Whether the drafter has something to do: to draft, or to copy what the target copies."""
        if self.features is Features.DRAFT:
            return True
        return not all(copy.frees_slot for copy in self.copies)

    def features_after(self, accepted: Sequence[int]) -> Features:
        """Return what becomes of the features, once it is known how many drafts were accepted.

        If no text that the drafter follows goes on, there is nothing to draft.
        """
        if self.features is not Features.DRAFT:
            return self.features
        for sequence, count in zip(self.sequences, accepted, strict=True):
            if sequence.follows and (sequence.prompt_goes_on or sequence.budget - count > 1):
                return Features.DRAFT
        return Features.KEEP


@dataclass(slots=True)
class Logprobs:
    """Log-probabilities of tokens, and of the K best in their places; both `[tokens, 1 + K]`."""

    values: Float32
    ids: Int64


@dataclass(slots=True)
class SequenceResult:
    """What a round made of a sequence."""

    accepted: int  # drafts
    token: int  # the target's, after them
    # its logits are not finite or its grammar allows nothing: the rest has no meaning
    failed: bool = False
    # tokens whose features are buffered for the drafter; None: it does not follow the text
    buffered: int | None = 0
    # of the accepted drafts and `token`, or of what follows each token of a prompt chunk, if
    # `scores_prompt`; None: not requested
    logprobs: Logprobs | None = None
    # of each draft, NaN after a rejected one; empty if not requested
    draft_logprobs: Sequence[float] = ()


@dataclass(slots=True)
class Anchor:
    """Where the drafter goes on in a sequence's text."""

    token: int
    position: int
    start: int  # position of the sequence's first feature
    room: int  # drafts that its text may still get
    failed: bool = False  # its sequence has


@dataclass(slots=True)
class DrafterInput:
    """Tap features `[n, C, taps * hidden_size]` to inject, and the anchors of the next blocks.

    A sequence's features are the buffered ones, then those of this round's tokens, accepted ones
    first. The drafter's mask hides the others.
    """

    features: FeatureArray
    anchors: Sequence[Anchor]


@dataclass(slots=True)
class VerifyResult:
    results: list[SequenceResult]
    seconds: float
    drafter_input: DrafterInput | None = None  # None: the drafter does not run


@dataclass(slots=True)
class Candidates:
    """The drafter's candidates for D drafts of a sequence, best first.

    ids `[D, k]`. probs: softmax over the k candidates, which only proposals depend on: `[D, k]`, or
    `[D, k * k]` if they depend on the candidate before.
    """

    ids: Int64
    probs: Float32


@dataclass(slots=True)
class DraftResult:
    candidates: list[Candidates]
    seconds: float


@dataclass(slots=True)
class RoundResult:
    results: list[SequenceResult]
    verify_seconds: float
    drafts: DraftResult | None = None  # None: the drafter did not run

    @property
    def draft_seconds(self) -> float:
        return 0.0 if self.drafts is None else self.drafts.seconds


RunRound = Callable[[Round], RoundResult]

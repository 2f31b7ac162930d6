"""What a round takes and gives. A field of these tuples is a tensor of the Triton ensemble,
a float one of shape `[1]`.

Few tensors: at the speed of a small model each of them counts.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

NO_HISTORY = NO_DRAFT = -1
DROPPED = -1  # of drafts wanted: none, nor are these tokens' features to be kept for later ones
FORGOTTEN = -1  # where a row moves whose sequence has ended

Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.object_]


class VerifyInput(NamedTuple):
    """Tokens to check for n sequences, which occupy n cache rows side by side.

    A row's first `forced` tokens are known to be right (a prompt chunk, or the anchor); the rest,
    up to `length`, are drafts: a chain, or a tree by `parents`. Prefilling is verifying a prompt.
    Where the prompt's log-probabilities are wanted, the token after its chunk stands behind it.
    """

    # [3 + 3m]: first cache row, drafts wanted (or DROPPED), candidates of each, and sequences that
    # move before anything else is done: from which row, to which (or FORGOTTEN), and their tokens
    batch: Int64
    rows: Int64  # [n, 4]: length 1..S, forced 1..length, position of the first token, budget
    tokens: Int64  # [n, S]
    parents: Int64  # [n, S]: each token's parent among the row's, anchor 0; [n, 1]: all are chains
    rules: Bytes  # [n]: `rules.encode`
    uniforms: Float64  # [n, 2k + 1]: k + 1 numbers to accept with, k to draft with; or [n, 1]
    history: Int64  # [n, L]: tokens before `tokens` where the rules need them, then -1
    candidate_ids: Int64  # [n, D, k]: what each draft was drawn from; D is 1 if all are greedy
    candidate_probs: Float32  # [n, D, k]


class VerifyOutput(NamedTuple):
    """What the target says."""

    # [n, 3 + P]: drafts kept (-1: the row failed), the target's own token after them, how many of
    # the features are of earlier steps, and which tokens of a tree were kept (P is 0 for chains)
    results: Int64
    features: Float32  # [n, C, taps * hidden_size], first those held back so far
    # [n, D + 1, 1 + K]: of each committed token, and of the K best there; of a scored prompt chunk
    # those after each of its tokens
    logprobs: Float32
    logprob_ids: Int64  # [n, D + 1, K + 1]: the committed token, the K best; [n, 1, 1] if unasked
    verify_seconds: float


class DraftInput(NamedTuple):
    """Verified features to inject, and the anchor of the next block."""

    batch: Int64
    rows: Int64
    rules: Bytes
    uniforms: Float64
    results: Int64
    features: Float32


class DraftOutput(NamedTuple):
    """The next drafts, and what they were drawn from or may be chosen from."""

    drafts: Int64  # [n, D]; -1: no more drafts in this row
    next_candidate_ids: Int64  # [n, D, k], best first; D is 1 if none are wanted
    # [n, D, k]; [n, D, k * k] where a candidate's probability depends on the one taken before
    next_candidate_probs: Float32
    draft_seconds: float


class Checked(NamedTuple):
    """What of `VerifyOutput` the loop needs, when the drafter does not run."""

    results: Int64
    logprobs: Float32
    logprob_ids: Int64
    verify_seconds: float


class RoundOutput(NamedTuple):
    """What a round returns to the loop: tokens and figures, never features.

    The fields of `Checked`, then those of `DraftOutput`.
    """

    results: Int64
    logprobs: Float32
    logprob_ids: Int64
    verify_seconds: float
    drafts: Int64
    next_candidate_ids: Int64
    next_candidate_probs: Float32
    draft_seconds: float


RunRound = Callable[[VerifyInput], RoundOutput]


def moves_of(numbers: Sequence[int]) -> Iterable[tuple[int, int, int]]:
    """From which row, to which, and how many tokens: see `VerifyInput.batch`."""
    return zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)


# The parts of a greedy batch that are the same for all batches of its size.


@lru_cache(maxsize=256)
def no_rules(n: int) -> tuple[Bytes, Float64, Int64]:
    """Rules, uniforms and history of n plain greedy rows."""
    return np.full(n, b"", object), np.zeros((n, 1)), np.full((n, 1), NO_HISTORY)


@lru_cache(maxsize=256)
def chains(n: int) -> Int64:
    """Parents of n rows that are chains."""
    return np.zeros((n, 1), np.int64)


@lru_cache(maxsize=256)
def no_candidates(n: int) -> tuple[Int64, Float32]:
    """Candidate ids and probabilities of n greedy rows."""
    return np.zeros((n, 1, 1), np.int64), np.zeros((n, 1, 1), np.float32)

"""What a round takes and gives. A field of these tuples is a tensor of the Triton ensemble, a float
one of shape `[1]`; few, since at the speed of a small model each of them counts.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

NO_HISTORY = NO_DRAFT = -1
DISCARD = -1  # as a number of draft tokens: none, and features are not kept for later ones either
FREED = -1  # as the destination of a slot copy: its sequence has ended, the block goes

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.object_]


class VerifyInput(NamedTuple):
    """Tokens to check for n sequences, which have n slots side by side.

    A row's first tokens are known to be right (a prompt chunk, or the anchor); the rest are drafts:
    a chain, or a tree by `parents`. Prefilling is verifying a prompt. Where the prompt's
    log-probabilities are wanted, the token after its chunk comes too.
    """

    # [3 + 4m]: first slot, draft tokens to propose (or DISCARD), candidates of each, and what to
    # copy before anything else is done: from, to (or FREED), tokens, position of the first; slots,
    # or from KEPT on blocks of `PrefixCache`
    batch: Int64
    rows: Int64  # [n, 4]: tokens 1..S, known ones 1..tokens, position of the first, budget
    tokens: Int64  # [n, S]
    parents: Int64  # [n, S]: each token's parent among the row's, anchor 0; [n, 1]: all are chains
    sampling: Bytes  # [n]: `LogitsProcessor.encode`
    history: Int64  # [n, L]: tokens before `tokens` where logits depend on them, then -1
    # [n, 1 + D, vocab / 32]: bits of the tokens that may follow the anchor and each draft;
    # [n, 1, 1] of -1 if any may
    masks: Int32


class Checked(NamedTuple):
    """What the loop needs of `VerifyOutput` when the drafter does not run."""

    # [n, 3 + P]: drafts kept (-1: the row failed), the target's own token after them, how many of
    # the features are of earlier steps, and which tokens of a tree were kept (P is 0 for chains)
    results: Int64
    # [n, D + 1, 1 + K]: of each committed token, and of the K best there; of a scored prompt chunk
    # those after each of its tokens
    logprobs: Float32
    logprob_ids: Int64  # [n, D + 1, 1 + K]: the committed token, the K best; [n, 1, 1] if unasked
    verify_seconds: float


class VerifyOutput(NamedTuple):
    """What the target says; the fields are those of `Checked`, and the features."""

    results: Int64
    features: Float32  # [n, C, taps * hidden_size], first those from the feature buffer
    logprobs: Float32
    logprob_ids: Int64
    verify_seconds: float


class DraftInput(NamedTuple):
    """Verified features to inject, and the anchor of the next block."""

    batch: Int64
    rows: Int64
    results: Int64
    features: Float32


class DraftOutput(NamedTuple):
    """What the next drafts may be chosen from."""

    candidate_ids: Int64  # [n, D, k], best first; -1: no more drafts in this row
    # [n, D, k] at temperature 1; [n, D, k * k] where they depend on the candidate taken before
    candidate_probs: Float32
    draft_seconds: float


class RoundOutput(NamedTuple):
    """What a round returns to the loop, never features: the fields of `Checked`, then those of
    `DraftOutput`."""

    results: Int64
    logprobs: Float32
    logprob_ids: Int64
    verify_seconds: float
    candidate_ids: Int64
    candidate_probs: Float32
    draft_seconds: float


RunRound = Callable[[VerifyInput], RoundOutput]


def slot_copies(numbers: Sequence[int]) -> Iterable[tuple[int, int, int, int]]:
    """From which slot, to which, how many tokens and from where on: see `VerifyInput.batch`."""
    return zip(*(numbers[i::4] for i in range(4)), strict=True)


def verify_input(
    batch: Sequence[int],
    rows: Sequence[Sequence[int]],
    lines: Sequence[Sequence[int]],
    parents: Int64 | None = None,
    sampling: Bytes | None = None,
    history: Int64 | None = None,
    masks: Int32 | None = None,
) -> VerifyInput:
    """Rows of the tokens `lines`; what is not given is that of plain greedy chains."""
    n, width = len(lines), max(map(len, lines))
    chains, greedy, no_history, no_masks = _plain(n)
    return VerifyInput(
        batch=np.array(batch),
        rows=np.array(rows),
        tokens=np.array([[*line, *[0] * (width - len(line))] for line in lines]),
        parents=chains if parents is None else parents,
        sampling=greedy if sampling is None else sampling,
        history=no_history if history is None else history,
        masks=no_masks if masks is None else masks,
    )


@lru_cache(maxsize=256)
def _plain(n: int) -> tuple[Int64, Bytes, Int64, Int32]:
    """Parents, sampling, history and masks of n plain greedy rows."""
    return (
        np.zeros((n, 1), np.int64),
        np.full(n, b"", object),
        np.full((n, 1), NO_HISTORY),
        np.full((n, 1, 1), -1, np.int32),
    )


def no_drafts(n: int) -> DraftOutput:
    """That of a target which decodes alone, or of rows that are still being prefilled."""
    # no tensor of the ensemble is ever empty
    return DraftOutput(np.full((n, 1, 1), NO_DRAFT), np.zeros((n, 1, 1), np.float32), 0.0)

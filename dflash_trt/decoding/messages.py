"""The messages of a round: each field is a tensor of the Triton ensemble; a float has shape `[1]`.

There are few, because each tensor costs time that matters with a small model. n sequences are in a
step, S tokens of each at most, D drafts, K log-probabilities and C features.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

NO_HISTORY = NO_DRAFT = -1
DISCARD = -1  # as draft tokens wanted: none, and drop the features; 0: none, and buffer them
FREED = -1  # as destination of a copy: the sequence has ended, or the block is dropped

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.object_]


class VerifyInput(NamedTuple):
    """Tokens to verify for n sequences in n adjacent slots.

    A row begins with known tokens (a prompt chunk, or the anchor); the rest are drafts. Prefilling
    is verifying a prompt.
    """

    # [3 + 4m]: first slot, draft tokens to make afterwards (0: buffer the features, or DISCARD),
    # candidates of each, then m copies to do first: from, to (or FREED), tokens, position of the
    # first; numbers from FIRST_BLOCK on are blocks of `PrefixCache`, others slots
    batch: Int64
    # [n, 5]: number of tokens and of known ones (of a hybrid the same in all rows), position of the
    # first, the text's remaining budget: 0 while a prompt goes on, 1 for no drafts; and how many
    # drafts of the last round were accepted, which a hybrid's states do not hold yet
    rows: Int64
    # [n, S], padded with 0; if the prompt's log-probabilities are asked for, followed by the token
    # after the chunk, which `rows` does not count
    tokens: Int64
    sampling: Bytes  # [n]: `LogitsProcessor.encode`
    history: Int64  # [n, L]: tokens before `tokens` if logits depend on them, padded with -1
    # [n, 1 + D, vocab / 32]: bit masks of allowed tokens after the anchor and each draft; [n, 1, 1]
    # of -1 if all are allowed
    masks: Int32


class Checked(NamedTuple):
    """The output of the Triton model `verify` for the scheduler; features stay in the ensemble."""

    # [n, 3]: accepted drafts (-1: the row failed), the target's token after them, number of
    # features from earlier rounds
    results: Int64
    # [n, D + 1, 1 + K]: log-probabilities of each committed token and the K best; of a scored
    # prompt chunk, of the token after each of its tokens. [n, 1, 1] if not requested, and one more
    # column with `include_drafting`
    logprobs: Float32
    logprob_ids: Int64  # [n, D + 1, 1 + K]: ids of these; [n, 1, 1] if not requested
    verify_seconds: float


class VerifyOutput(NamedTuple):
    """The target's output: the fields of `Checked` and the tap features."""

    results: Int64
    # [n, C, taps * hidden_size]: buffered ones, those of accepted tokens, then others that the
    # drafter's mask hides; [n, 1, ...] without meaning if no drafts are made
    features: Float32
    logprobs: Float32
    logprob_ids: Int64
    verify_seconds: float


class DraftInput(NamedTuple):
    """Features to inject, see `VerifyOutput`, and the anchor of the next block."""

    batch: Int64
    rows: Int64
    results: Int64
    features: Float32


class DraftOutput(NamedTuple):
    candidate_ids: Int64  # [n, D, k], best first; -1: no more drafts in this row
    # softmax over the k candidates, which only proposals depend on: [n, D, k]; [n, D, k * k] if
    # they depend on the candidate before
    candidate_probs: Float32
    draft_seconds: float


class RoundOutput(NamedTuple):
    """The output of a round, without features: `Checked`, then `DraftOutput`."""

    results: Int64
    logprobs: Float32
    logprob_ids: Int64
    verify_seconds: float
    candidate_ids: Int64
    candidate_probs: Float32
    draft_seconds: float


RunRound = Callable[[VerifyInput], RoundOutput]


def parse_copies(numbers: Sequence[int]) -> Iterable[tuple[int, int, int, int]]:
    """Yield (source, destination, tokens, start) of each copy; see `VerifyInput.batch`."""
    return zip(*(numbers[i::4] for i in range(4)), strict=True)


def all_texts_end(rows: Sequence[Sequence[int]], results: Sequence[Sequence[int]]) -> bool:
    """Return whether no text of a round has room for drafts: then the drafter does not run."""
    budgets = (budget for _, _, _, budget, _ in rows)
    return all(
        budget and budget - accepted <= 1
        for budget, (accepted, *_) in zip(budgets, results, strict=True)
    )


def verify_input(
    batch: Sequence[int],
    rows: Sequence[Sequence[int]],
    lines: Sequence[Sequence[int]],
    sampling: Bytes | None = None,
    history: Int64 | None = None,
    masks: Int32 | None = None,
) -> VerifyInput:
    """Build a VerifyInput of the tokens `lines`; defaults are plain greedy."""
    n, width = len(lines), max(map(len, lines))
    greedy, no_history, no_masks = _plain_greedy(n)
    return VerifyInput(
        batch=np.array(batch),
        rows=np.array(rows),
        tokens=np.array([[*line, *[0] * (width - len(line))] for line in lines]),
        sampling=greedy if sampling is None else sampling,
        history=no_history if history is None else history,
        masks=no_masks if masks is None else masks,
    )


@lru_cache(maxsize=256)
def _plain_greedy(n: int) -> tuple[Bytes, Int64, Int32]:
    return (
        np.full(n, b"", object),
        np.full((n, 1), NO_HISTORY),
        np.full((n, 1, 1), -1, np.int32),
    )


def no_drafts(n: int) -> DraftOutput:
    # tensors of the ensemble are never empty
    return DraftOutput(np.full((n, 1, 1), NO_DRAFT), np.zeros((n, 1, 1), np.float32), 0.0)

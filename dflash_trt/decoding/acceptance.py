"""Acceptance of drafts: those equal to the target's own greedy or sampled token. Lossless.

This is no rejection sampling: the target's token is drawn by seeded Gumbel-max, whatever the drafts
are, and the drafter's probabilities are not used.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dflash_trt.decoding.arrays import Float32, Int32, Int64
from dflash_trt.decoding.logits_processor import LogitsProcessor, unpack
from dflash_trt.decoding.messages import RoundSequence
from dflash_trt.decoding.sampling import NO_TOKEN, sample

NO_TEXT: Int64 = np.empty(0, np.int64)
ReadLogits = Callable[[], Float32]  # `[n, D + 1, vocab]`; a GPU copies them to the host then


class Accepted(NamedTuple):
    drafts: int  # how many
    token: int  # the target's, after them


def accept(
    sequences: Sequence[RoundSequence], greedy_ids: Sequence[Sequence[int]], read_logits: ReadLogits
) -> list[Accepted | None]:
    """Accept each sequence's drafts up to the first that differs from the target's choice.

    greedy_ids `[n, D + 1]`: the target's likeliest token after the anchor and each draft, NO_TOKEN
    where its logits are not finite. Logits are read only if a sequence samples, has other rules
    than greedy ones, or a grammar that forbids a likeliest token. A sequence's result is None if at
    a place it needs its logits are not finite or no token is allowed.
    """
    results: list[Accepted | None] = [None] * len(sequences)
    sampled: list[_SampledSequence] = []
    for index, sequence in enumerate(sequences):
        if sequence.processor.greedy:
            choices = _likeliest_allowed(greedy_ids[index], sequence.masks, index, read_logits)
            results[index] = accept_greedy(sequence.drafts, choices)
        else:
            next_position = sequence.position + sequence.known
            sampled.append(_SampledSequence(index, sequence, next_position, _text_of(sequence)))
    if sampled:
        _accept_sampled(sampled, greedy_ids, read_logits(), results)
    return results


def accept_greedy(drafts: Sequence[int], greedy_ids: Sequence[int]) -> Accepted | None:
    """Accept drafts; greedy_ids has at least one token more."""
    count = 0
    while count < len(drafts) and drafts[count] == greedy_ids[count]:
        count += 1
    if greedy_ids[count] == NO_TOKEN:
        return None
    return Accepted(count, greedy_ids[count])


@dataclass(slots=True)
class _SampledSequence:
    index: int
    brought: RoundSequence
    next_position: int  # in the text, of the token after the anchor
    text: Int64  # with the drafts, if the processor needs it
    accepted: int = 0  # drafts so far

    @property
    def processor(self) -> LogitsProcessor:
        return self.brought.processor

    @property
    def mask(self) -> Int32 | None:
        """A grammar's bit mask of the next token."""
        if not self.brought.masks:
            return None
        return self.brought.masks[self.accepted]

    @property
    def history(self) -> Int64:
        """The tokens before the next one, if the processor needs them."""
        drafts_left = len(self.brought.drafts) - self.accepted
        return self.text[: max(len(self.text) - drafts_left, 0)]


def _text_of(sequence: RoundSequence) -> Int64:
    if not sequence.processor.needs_history:
        return NO_TEXT
    return np.array([*sequence.history, *sequence.tokens])


def _accept_sampled(
    sequences: Sequence[_SampledSequence],
    greedy_ids: Sequence[Sequence[int]],
    logits: Float32,
    results: list[Accepted | None],
) -> None:
    """Sample tokens for all sequences at once, then where the draft was accepted, and so on."""
    while sequences:
        going = []
        for sequence, token in zip(sequences, _sample_next(sequences, logits), strict=True):
            if greedy_ids[sequence.index][sequence.accepted] == NO_TOKEN or token == NO_TOKEN:
                continue
            drafts = sequence.brought.drafts
            if sequence.accepted < len(drafts) and drafts[sequence.accepted] == token:
                sequence.accepted += 1
                going.append(sequence)
            else:
                results[sequence.index] = Accepted(sequence.accepted, token)
        sequences = going


def _sample_next(sequences: Sequence[_SampledSequence], logits: Float32) -> list[int]:
    positions = [sequence.next_position + sequence.accepted for sequence in sequences]
    likely = [
        sequence.processor.likely(
            logits[sequence.index, sequence.accepted], position, sequence.history, sequence.mask
        )
        for sequence, position in zip(sequences, positions, strict=True)
    ]
    return sample(likely, [sequence.processor.sampling.seed for sequence in sequences], positions)


def _likeliest_allowed(
    greedy_ids: Sequence[int],
    masks: Sequence[Int32 | None],
    index: int,
    read_logits: ReadLogits,
) -> Sequence[int]:
    """Return the likeliest allowed tokens of sequence `index`; NO_TOKEN where none is allowed."""
    if not masks:
        return greedy_ids
    choices = list(greedy_ids)
    for place, mask in enumerate(masks):
        token = greedy_ids[place]
        if mask is None or token == NO_TOKEN or _is_allowed(mask, token):
            continue
        logits = read_logits()[index, place]
        allowed = unpack(mask, len(logits))
        if allowed.any():
            choices[place] = int(np.where(allowed, logits, -np.inf).argmax())
        else:
            choices[place] = NO_TOKEN
    return choices


def _is_allowed(mask: Int32, token: int) -> bool:
    word, bit = divmod(token, 32)
    return bool(int(mask[word]) >> bit & 1)

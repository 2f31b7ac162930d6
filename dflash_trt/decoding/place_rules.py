"""The rules of a round as arrays: what a device needs to choose all of a round's tokens at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from dflash_trt.decoding.arrays import Bools, Float32, Int32, Int64
from dflash_trt.decoding.messages import RoundSequence
from dflash_trt.decoding.sampling import hash_bases

ALL_BITS = -1  # a word of a mask that allows every token
NOT_CHOSEN = -1
WORD = 32  # bits of a mask

Array = TypeVar("Array", Int32, Int64, Float32)


@dataclass(frozen=True)
class PlaceRules:
    """What chooses the tokens at m places, each after a token of a round; drafts count as accepted.

    The logits of e tokens are edited: a bias is added, then penalties apply.
    """

    integers: Int64  # [3, m]: row of the logits, base of the noise, top_k
    numbers: Float32  # [6, m]: temperature, top_p, min_p; repetition, presence, frequency penalty
    edited: Int64  # [2, e]: which of the m places, and the token
    edits: Float32  # [3, e]: bias, 1 if the text has the token, how often its output has it
    banned: Int64  # [2, b]: as `edited`
    masks: Int32  # [vocab / 32, m]: bits of allowed tokens; [0, m]: all are allowed

    def only(self, chosen: Int64) -> "PlaceRules":
        """Return the rules of some of the m places."""
        renumbered = np.full(self.integers.shape[1], NOT_CHOSEN)
        renumbered[chosen] = np.arange(len(chosen))
        is_edited = renumbered[self.edited[0]] != NOT_CHOSEN
        is_banned = renumbered[self.banned[0]] != NOT_CHOSEN
        edited, banned = self.edited[:, is_edited], self.banned[:, is_banned]
        return PlaceRules(
            self.integers[:, chosen],
            self.numbers[:, chosen],
            np.stack((renumbered[edited[0]], edited[1])),
            self.edits[:, is_edited],
            np.stack((renumbered[banned[0]], banned[1])),
            self.masks[:, chosen],
        )

    def padded(self) -> "PlaceRules":
        """Return rules of few sizes: the last place, edit and ban are repeated."""
        return PlaceRules(
            _padded(self.integers),
            _padded(self.numbers),
            _padded(self.edited),
            _padded(self.edits),
            _padded(self.banned),
            _padded(self.masks),
        )


def _padded(array: Array) -> Array:
    size = array.shape[-1]
    if not size:
        return array
    padding = (1 << (size - 1).bit_length()) - size
    return np.concatenate((array, np.repeat(array[:, -1:], padding, 1)), 1)


@dataclass(frozen=True)
class _SequenceEdits:
    ids: Int64  # [t]
    bias: Float32  # [t]
    seen: Bools  # [1 + drafts, t]
    counts: Int64  # [1 + drafts, t]


def place_rules(
    sequences: Sequence[RoundSequence], first_rows: Sequence[int], vocab: int
) -> PlaceRules:
    """Return the rules of what each sequence's last known token and drafts are followed by.

    first_rows: of the logits, those of each sequence's last known token.
    """
    lengths = [1 + len(sequence.drafts) for sequence in sequences]
    offsets = np.cumsum([0, *lengths[:-1]])
    integers, numbers = list[tuple[int, int]](), list[tuple[float, ...]]()
    positions, seeds = list[int](), list[int]()
    for sequence, first, length in zip(sequences, first_rows, lengths, strict=True):
        sampling = sequence.processor.sampling
        next_position = sequence.position + sequence.known
        positions += range(next_position, next_position + length)
        seeds += [sampling.seed] * length
        integers += [(first + index, sampling.top_k) for index in range(length)]
        of_sequence = (
            sampling.temperature,
            sampling.top_p,
            sampling.min_p,
            sampling.repetition_penalty,
            sampling.presence_penalty,
            sampling.frequency_penalty,
        )
        numbers += [of_sequence] * length
    logits_rows, top_k = np.array(integers).T
    bases = hash_bases(seeds, positions).view(np.int64)
    edited, edits = _edits(sequences, offsets)
    return PlaceRules(
        np.stack((logits_rows, bases, top_k)),
        np.array(numbers, np.float32).T,
        edited,
        edits,
        _banned(sequences, offsets),
        _masks(sequences, offsets, len(integers), -(-vocab // WORD)),
    )


def _edits(sequences: Sequence[RoundSequence], offsets: Int64) -> tuple[Int64, Float32]:
    edited, edits = [np.empty((2, 0), np.int64)], [np.empty((3, 0), np.float32)]
    for sequence, offset in zip(sequences, offsets.tolist(), strict=True):
        of_sequence = _edits_of(sequence)
        if of_sequence is None:
            continue
        length, tokens = of_sequence.counts.shape
        places = np.repeat(np.arange(offset, offset + length), tokens)
        edited.append(np.stack((places, np.tile(of_sequence.ids, length))))
        bias = np.tile(of_sequence.bias, length)
        numbers = (bias, of_sequence.seen.ravel(), of_sequence.counts.ravel())
        edits.append(np.stack(numbers, dtype=np.float32, casting="unsafe"))
    return np.concatenate(edited, 1), np.concatenate(edits, 1)


def _edits_of(sequence: RoundSequence) -> _SequenceEdits | None:
    """Return a sequence's tokens whose logits change, and by what."""
    processor, sampling = sequence.processor, sequence.processor.sampling
    if not (processor.penalizes or sampling.logit_bias):
        return None
    drafts = np.array(sequence.drafts, np.int64)
    text = drafts[:0]
    if processor.penalizes:
        text = np.array([*sequence.history, *sequence.tokens[: sequence.known]], np.int64)
    else:
        drafts = drafts[:0]
    biased = np.array([token for token, _ in sampling.logit_bias], np.int64)
    ids = np.unique(np.concatenate((text, drafts, biased)))
    bias = np.zeros(len(ids), np.float32)
    np.add.at(bias, ids.searchsorted(biased), [value for _, value in sampling.logit_bias])
    width = 1 + len(sequence.drafts)
    counts = np.zeros((width, len(ids)), np.int64)
    seen = np.zeros((width, len(ids)), bool)
    counts[:] = np.bincount(ids.searchsorted(text[processor.prompt_tokens :]), minlength=len(ids))
    seen[:, ids.searchsorted(text)] = True
    for index, place in enumerate(ids.searchsorted(drafts).tolist()):
        counts[index + 1 :, place] += 1
        seen[index + 1 :, place] = True
    return _SequenceEdits(ids, bias, seen, counts)


def _banned(sequences: Sequence[RoundSequence], offsets: Int64) -> Int64:
    pairs = []
    for sequence, offset in zip(sequences, offsets.tolist(), strict=True):
        sampling = sequence.processor.sampling
        if not (sampling.min_tokens or sampling.bad_words):
            continue
        text = [*sequence.history, *sequence.tokens] if sampling.bad_words else []
        for index in range(1 + len(sequence.drafts)):
            before = text[: len(text) - len(sequence.drafts) + index]
            position = sequence.position + sequence.known + index
            pairs += [
                (offset + index, token) for token in sequence.processor.banned(position, before)
            ]
    return np.array(pairs, np.int64).reshape(-1, 2).T


def _masks(sequences: Sequence[RoundSequence], offsets: Int64, places: int, words: int) -> Int32:
    if not any(mask is not None for sequence in sequences for mask in sequence.masks):
        return np.empty((0, places), np.int32)
    masks = np.full((words, places), ALL_BITS, np.int32)
    for sequence, offset in zip(sequences, offsets.tolist(), strict=True):
        for index, mask in enumerate(sequence.masks):
            if mask is not None:
                masks[: len(mask), offset + index] = mask
    return masks

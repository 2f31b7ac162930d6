"""Tap features that the drafter has not taken in yet."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from dflash_trt.decoding.arrays import FeatureArray
from dflash_trt.decoding.messages import Copy, Round
from dflash_trt.engines import FIRST_BLOCK, FIRST_STATE, most_buffered
from dflash_trt.speculation import Features

BUFFER_MULTIPLE = 16  # buffered features are padded to it, so that few shapes are bound


@dataclass(slots=True)
class Passed:
    """What a buffer made of a round's features."""

    features: FeatureArray | None  # for the drafter: `[n, C, F]`; None: it does not run
    before: list[int]  # of each sequence's `features`, how many were buffered before this round
    buffered: list[int | None]  # now; None: dropped, or the drafter did not follow before


@dataclass(slots=True)
class _Parts:
    """A slot's buffered features, one array per round."""

    arrays: list[FeatureArray] = field(default_factory=list)
    tokens: int = 0  # in all

    def append(self, features: FeatureArray) -> None:
        self.arrays.append(features)
        self.tokens += len(features)

    def clear(self) -> None:
        self.arrays.clear()
        self.tokens = 0


class FeatureBuffer:
    """Tap features by slot, of sequences that the drafter follows."""

    def __init__(self, limit: int = most_buffered(1)) -> None:
        """Set up; limit: tokens of a slot, see `most_buffered`. Features beyond it are dropped."""
        self._limit = limit
        self._parts: dict[int, _Parts] = {}  # by slot
        self._ends: dict[int, int] = {}  # the position after a slot's features
        # by number of a hybrid's state in the prefix cache
        self._states: dict[int, FeatureArray] = {}

    def pass_on(self, round: Round, accepted: Sequence[int], features: FeatureArray) -> Passed:
        """Pass features on to the drafter if it runs now; otherwise buffer or drop them.

        features `[n, S, F]`, in order: of each sequence's known tokens, accepted drafts, rejected
        drafts and padding.
        """
        self._move(round.copies)
        n = len(round.sequences)
        slots = range(round.first_slot, round.first_slot + n)
        if round.features is Features.DROP:
            for slot in slots:
                self._parts.pop(slot, None)
            return Passed(None, [0] * n, [None] * n)
        counts = [
            sequence.known + count
            for sequence, count in zip(round.sequences, accepted, strict=True)
        ]
        parts_of_sequences: list[_Parts | None] = []
        for slot, sequence, count in zip(slots, round.sequences, counts, strict=True):
            parts_of_sequences.append(
                self._parts_before(slot, sequence.position) if sequence.follows else None
            )
            self._ends[slot] = sequence.position + count
            if not sequence.follows:
                self._parts.pop(slot, None)
        if round.features_after(accepted) is Features.KEEP:
            return self._keep(parts_of_sequences, counts, features)
        return _join(parts_of_sequences, features)

    def _keep(
        self,
        parts_of_sequences: Sequence[_Parts | None],
        counts: Sequence[int],
        features: FeatureArray,
    ) -> Passed:
        """Append each sequence's first `count` features to its parts."""
        kept = _concatenated(
            [of_sequence[:count] for of_sequence, count in zip(features, counts, strict=True)]
        )
        buffered: list[int | None] = []
        start = 0
        for parts, count in zip(parts_of_sequences, counts, strict=True):
            new = kept[start : start + count]
            start += count
            if parts is None:
                buffered.append(None)
                continue
            if parts.tokens + count > self._limit:
                parts.clear()
                buffered.append(None)
                continue
            parts.append(new)
            buffered.append(parts.tokens)
        assert all(parts.tokens <= self._limit for parts in self._parts.values())
        return Passed(None, [0] * len(counts), buffered)

    def _parts_before(self, slot: int, position: int) -> _Parts:
        """Return a slot's features up to a position, not those left from an ended sequence."""
        if slot not in self._parts or self._ends.get(slot) != position:
            self._parts[slot] = _Parts()
        return self._parts[slot]

    def _move(self, copies: Iterable[Copy]) -> None:
        """Move features along with what is copied, in the order of the copies."""
        for copy in copies:
            source, destination = copy.source, copy.destination
            end = copy.start + copy.tokens
            if destination is None:
                self._states.pop(source, None)
                self._parts.pop(source, None)
                self._ends.pop(source, None)
            elif destination >= FIRST_STATE:
                self._store_state(source, destination, end)
            elif destination >= FIRST_BLOCK:
                continue  # a block is stored; the sequence goes on
            elif source >= FIRST_STATE:
                parts = _Parts()
                if source in self._states:
                    parts.append(self._states[source])
                self._parts[destination] = parts
                self._ends[destination] = end
            else:
                self._parts[destination] = self._parts.pop(source, _Parts())
                self._ends[destination] = self._ends.pop(source, 0)

    def _store_state(self, slot: int, number: int, end: int) -> None:
        """Store a slot's features of tokens before `end`; those of the last drafts come after."""
        parts = self._parts.get(slot)
        if parts is None or not parts.tokens:
            self._states.pop(number, None)
            return
        later = self._ends[slot] - end
        self._states[number] = _concatenated(parts.arrays)[: max(parts.tokens - later, 0)]


def _zeros(shape: tuple[int, ...], like: FeatureArray) -> FeatureArray:
    """Return zeros where `like` is: numpy's, or on its GPU."""
    if isinstance(like, np.ndarray):
        return np.zeros(shape, like.dtype)
    return like.new_zeros(shape)


def _concatenated(arrays: Sequence[FeatureArray]) -> FeatureArray:
    """Return a copy of arrays one after the other; on a GPU that is one call, not one for each."""
    if isinstance(arrays[0], np.ndarray):
        return np.concatenate(arrays)
    import torch  # noqa: PLC0415  (not where features are numpy's)

    return torch.cat([*arrays])


def _join(parts_of_sequences: Sequence[_Parts | None], features: FeatureArray) -> Passed:
    """Return features behind buffered ones, which are none then."""
    n, width, size = features.shape
    before = [0 if parts is None else parts.tokens for parts in parts_of_sequences]
    buffered = [None if parts is None else 0 for parts in parts_of_sequences]
    if not any(before):
        return Passed(features, before, buffered)
    padded = -(-max(before) // BUFFER_MULTIPLE) * BUFFER_MULTIPLE
    joined = _zeros((n, padded + width, size), features)
    for whole, parts, new in zip(joined, parts_of_sequences, features, strict=True):
        if parts is None:
            whole[:width] = new
            continue
        whole[: parts.tokens + width] = _concatenated([*parts.arrays, new])
        parts.clear()
    return Passed(joined, before, buffered)

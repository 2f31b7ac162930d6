"""Tap features that wait for the drafter."""

from collections.abc import Sequence

import numpy as np

from dflash_trt.decoding.messages import (
    DISCARD,
    FREED,
    Float32,
    VerifyInput,
    all_texts_end,
    parse_copies,
)
from dflash_trt.engines import FIRST_BLOCK, FIRST_STATE

BUFFER_MULTIPLE = 16  # buffered features are padded to it, so that few shapes are bound


class FeatureBuffer:
    """Tap features by slot; the scheduler drafts before one has more than `MAX_BUFFERED` tokens."""

    def __init__(self) -> None:
        self._parts: dict[int, list[Float32]] = {}  # by slot, one array per round
        self._ends: dict[int, int] = {}  # the position after a slot's features
        self._kept: dict[int, Float32] = {}  # by number of a hybrid's kept state

    def pass_on(
        self, x: VerifyInput, accepted: Sequence[int], features: Float32
    ) -> tuple[Float32, list[int]]:
        """Return features for the drafter `[n, C, F]` and each row's number of buffered ones in it.

        features `[n, S, F]` of the tokens of `x`, accepted ones first. If no drafts are made they
        are buffered, or with DISCARD dropped together with the buffer.
        """
        first_slot, draft_tokens, _, *copies = x.batch.tolist()
        n, width, size = features.shape
        self._move(copies)
        if draft_tokens == DISCARD:
            for slot in range(first_slot, first_slot + n):
                self._parts.pop(slot, None)
            return features[:, :1], [0] * n
        rows = x.rows.tolist()
        counts = []
        for slot, (_, known, place, *_) in enumerate(rows, first_slot):
            counts.append(known + max(accepted[slot - first_slot], 0))
            if self._ends.get(slot) != place:  # left from an ended sequence
                self._parts[slot] = []
            self._ends[slot] = place + counts[-1]
        older = [self._parts.setdefault(slot, []) for slot in range(first_slot, first_slot + n)]
        if not draft_tokens or all_texts_end(rows, [[count] for count in accepted]):
            ours = features[:, : max(counts)].copy()
            for i, count in enumerate(counts):
                older[i].append(ours[i, :count])
            return features[:, :1], [0] * n
        buffered = [sum(map(len, parts)) for parts in older]
        if not any(buffered):
            return features, buffered
        padded = -(-max(buffered) // BUFFER_MULTIPLE) * BUFFER_MULTIPLE
        joined = np.zeros((n, padded + width, size), np.float32)
        for i, parts in enumerate(older):
            lines = np.concatenate([*parts, features[i]])
            joined[i, : len(lines)] = lines
            parts.clear()
        return joined, buffered

    def _move(self, copies: Sequence[int]) -> None:
        """Move features along with what is copied, in the order of the copies."""
        for source, destination, tokens, start in parse_copies(copies):
            if destination >= FIRST_STATE:
                self._keep(source, destination, start + tokens)
            elif source >= FIRST_STATE and destination == FREED:
                self._kept.pop(source, None)
            elif source >= FIRST_STATE:
                kept = self._kept.get(source)
                self._parts[destination] = [] if kept is None else [kept]
                self._ends[destination] = start + tokens
            elif destination < FIRST_BLOCK:  # otherwise a block is stored; the sequence goes on
                parts, end = self._parts.pop(source, []), self._ends.pop(source, 0)
                if destination != FREED:
                    self._parts[destination], self._ends[destination] = parts, end

    def _keep(self, slot: int, number: int, end: int) -> None:
        """Keep a slot's features of tokens before `end`, those of the last drafts come after it."""
        parts = self._parts.get(slot)
        if not parts:
            self._kept.pop(number, None)
            return
        features = np.concatenate(parts)
        later = self._ends[slot] - end
        self._kept[number] = features[: max(len(features) - later, 0)]

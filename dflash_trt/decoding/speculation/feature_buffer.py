"""Feature buffer: tap features of committed tokens that the drafter has not taken in yet."""

from collections.abc import Sequence

import numpy as np

from dflash_trt.decoding.messages import DISCARD, FREED, Float32, VerifyInput, slot_copies
from dflash_trt.engines import FIRST_BLOCK

STEP = 16  # features are passed on in multiples of it, so that few shapes are bound


class FeatureBuffer:
    """Tap features by slot. The caller keeps each at `MAX_BUFFERED` tokens or fewer."""

    def __init__(self) -> None:
        self._parts: dict[int, list[Float32]] = {}  # by slot, one array per round
        self._ends: dict[int, int] = {}  # the position after a slot's features

    def pass_on(
        self, x: VerifyInput, accepted: Sequence[int], features: Float32
    ) -> tuple[Float32, list[int]]:
        """Return features for the drafter `[n, C, F]` and each row's number of buffered ones in it.

        features `[n, S, F]` of the tokens of `x`, accepted ones first. If no drafts are wanted they
        are buffered, or with DISCARD dropped together with the buffer.
        """
        first_slot, draft_tokens, _, *copies = x.batch.tolist()
        n, width, size = features.shape
        for source, destination, *_ in slot_copies(copies):
            if destination >= FIRST_BLOCK:  # copy to the prefix cache; the sequence goes on
                continue
            parts, end = self._parts.pop(source, []), self._ends.pop(source, 0)
            if destination != FREED:
                self._parts[destination], self._ends[destination] = parts, end
        if draft_tokens == DISCARD:
            for slot in range(first_slot, first_slot + n):
                self._parts.pop(slot, None)
            return features[:, :1], [0] * n
        kept = []
        for slot, (_, known, place, _) in enumerate(x.rows.tolist(), first_slot):
            kept.append(known + max(accepted[slot - first_slot], 0))
            if self._ends.get(slot) != place:  # left from an ended sequence
                self._parts[slot] = []
            self._ends[slot] = place + kept[-1]
        older = [self._parts.setdefault(slot, []) for slot in range(first_slot, first_slot + n)]
        if not draft_tokens:
            ours = features[:, : max(kept)].copy()
            for i, count in enumerate(kept):
                older[i].append(ours[i, :count])
            return features[:, :1], [0] * n
        counts = [sum(map(len, parts)) for parts in older]
        if not any(counts):
            return features, counts
        joined = np.zeros((n, -(-max(counts) // STEP) * STEP + width, size), np.float32)
        for i, parts in enumerate(older):
            rows = np.concatenate([*parts, features[i]])
            joined[i, : len(rows)] = rows
            parts.clear()
        return joined, counts

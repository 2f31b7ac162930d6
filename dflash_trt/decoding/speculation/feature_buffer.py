"""Features of committed tokens that the drafter has not taken in yet, because it did not run."""

from collections.abc import Sequence

import numpy as np

from dflash_trt.decoding.messages import DISCARD, FREED, Float32, VerifyInput, slot_copies
from dflash_trt.engines import KEPT

STEP = 16  # features are handed over in multiples of it, so that few steps are bound


class FeatureBuffer:
    """Keeps them by slot, of at most `engines.info.HELD` tokens each: the caller counts."""

    def __init__(self) -> None:
        self._parts: dict[int, list[Float32]] = {}  # by slot, of one round after another
        self._ends: dict[int, int] = {}  # the position after them

    def pass_on(
        self, x: VerifyInput, accepted: Sequence[int], features: Float32
    ) -> tuple[Float32, list[int]]:
        """What the drafter gets in this round `[n, C, F]`, and how many of each row are older.

        features `[n, S, F]` of the tokens of `x`, the kept ones first. If no drafts are asked for
        they are kept after those before, or discarded with them.
        """
        first_slot, draft_tokens, _, *copies = x.batch.tolist()
        n, width, size = features.shape
        for source, destination, *_ in slot_copies(copies):
            if destination >= KEPT:  # of a sequence that goes on
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
            if self._ends.get(slot) != place:  # of a sequence that has ended
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

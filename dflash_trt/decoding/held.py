"""Features of committed tokens that the drafter has not seen yet, because it did not run."""

from collections.abc import Sequence

import numpy as np

from dflash_trt.decoding.messages import Float32, VerifyInput

STEP = 16  # features are handed over in multiples of it, so that few steps are bound


class Held:
    """Keeps them by cache row, at most `engines.info.HELD` of each: the caller counts."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[int, list[Float32]]] = {}  # the position behind them; they

    def pass_on(
        self, x: VerifyInput, accepted: Sequence[int], features: Float32
    ) -> tuple[Float32, list[int]]:
        """What the drafter gets in this round `[n, C, F]`, and how many of each row are older.

        features `[n, S, F]` of the tokens of `x`, the kept ones first. If no drafts are wanted they
        are held back with those before.
        """
        first_row, wanted, _, *moves = x.batch.tolist()
        for source, destination in zip(moves[::2], moves[1::2], strict=True):
            self._rows[destination] = self._rows.pop(source, (0, []))
        older: list[list[Float32]] = []
        rows = x.rows.tolist()
        for row, (_, _, place, _) in enumerate(rows, first_row):
            end, parts = self._rows.pop(row, (place, []))
            older.append(parts if end == place else [])  # else of a sequence that has ended
        if not wanted:
            for i, (_, forced, place, _) in enumerate(rows):
                kept = forced + max(accepted[i], 0)
                parts = [*older[i], features[i, :kept].copy()]
                self._rows[first_row + i] = (place + kept, parts)
            return features[:, :1], [0] * len(rows)
        counts = [sum(map(len, parts)) for parts in older]
        if not any(counts):
            return features, counts
        n, width, size = features.shape
        joined = np.zeros((n, -(-max(counts) // STEP) * STEP + width, size), np.float32)
        for i, (parts, count) in enumerate(zip(older, counts, strict=True)):
            if parts:
                joined[i, :count] = np.concatenate(parts)
            joined[i, count : count + width] = features[i]
        return joined, counts

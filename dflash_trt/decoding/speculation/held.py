"""Features of committed tokens that the drafter has not seen yet, because it did not run."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dflash_trt.decoding.messages import DISCARD, FREED, Float32, VerifyInput, slot_copies
from dflash_trt.engines.info import HELD

STEP = 16  # features are handed over in multiples of it, so that few steps are bound
Part = tuple[Float32, int, int]  # a round's features, which row of it, how many are kept


@dataclass
class _Run:
    """Rounds that kept one token of each of the same rows: most rounds where nothing is drafted."""

    ends: list[int]  # the position behind each row
    rounds: list[Float32] = field(default_factory=list)


class Held:
    """Keeps them by cache row, at most `HELD` of each: the caller counts."""

    def __init__(self) -> None:
        self._parts: dict[int, list[Part]] = {}
        self._ends: dict[int, int] = {}  # the position behind them
        self._runs: dict[int, _Run] = {}  # of plain rounds, by first row: not among the parts yet
        # `[HELD, n, 1, F]` by first row, and which of them is next
        self._plain: dict[int, tuple[Float32, int]] = {}

    def pass_on(
        self, x: VerifyInput, accepted: Sequence[int], features: Float32
    ) -> tuple[Float32, list[int]]:
        """What the drafter gets in this round `[n, C, F]`, and how many of each row are older.

        features `[n, S, F]` of the tokens of `x`, the kept ones first. If no drafts are wanted they
        are held back with those before, or dropped with them.
        """
        first_row, wanted, _, *moves = x.batch.tolist()
        if wanted == DISCARD and not (self._runs or any(self._parts.values())):
            return features[:, :1], [0] * len(features)
        places = x.rows[:, 2].tolist()
        run = self._runs.get(first_row)
        plain = not wanted and not moves and features.shape[1] == 1
        if plain and run is not None and run.ends == places:
            run.rounds.append(self._copy(first_row, features, 1))
            run.ends = [place + 1 for place in places]
            return features, [0] * len(places)
        for each in [*self._runs]:
            self._end(each)
        for source, destination, _ in slot_copies(moves):
            parts, end = self._parts.pop(source, []), self._ends.pop(source, 0)
            if destination != FREED:
                self._parts[destination], self._ends[destination] = parts, end
        if wanted == DISCARD:
            for row in range(first_row, first_row + len(places)):
                self._parts.pop(row, None)
                self._ends.pop(row, None)
            return features[:, :1], [0] * len(places)
        older: list[list[Part]] = []
        kept = []
        for i, (_, forced, place, _) in enumerate(x.rows.tolist()):
            row, count = first_row + i, forced + max(accepted[i], 0)
            if self._ends.get(row) != place:  # of a sequence that has ended
                self._parts[row] = []
            older.append(self._parts[row])
            kept.append(count)
            self._ends[row] = place + count
        if not wanted:
            ours = self._copy(first_row, features, max(kept))
            for i, (parts, count) in enumerate(zip(older, kept, strict=True)):
                parts.append((ours, i, count))
            if plain:
                self._runs[first_row] = _Run([place + 1 for place in places])
            return features[:, :1], [0] * len(kept)
        if not any(older):
            return features, [0] * len(kept)
        lines = [[held[i, :count] for held, i, count in parts] for parts in older]
        counts = [sum(map(len, line)) for line in lines]
        n, width, size = features.shape
        joined = np.zeros((n, -(-max(counts) // STEP) * STEP + width, size), np.float32)
        for i, (line, count) in enumerate(zip(lines, counts, strict=True)):
            if line:
                joined[i, :count] = np.concatenate(line)
            joined[i, count : count + width] = features[i]
            self._parts[first_row + i] = []
        return joined, counts

    def _end(self, first_row: int) -> None:
        run = self._runs.pop(first_row)
        for i, end in enumerate(run.ends):
            self._parts[first_row + i] += [(features, i, 1) for features in run.rounds]
            self._ends[first_row + i] = end

    def _copy(self, first_row: int, features: Float32, kept: int) -> Float32:
        """The first `kept` of each row.

        Of plain rounds they go where older ones were: new memory takes longer than the copy, and a
        row that has part in HELD rounds holds HELD tokens.
        """
        if kept > 1:
            return features[:, :kept].copy()
        n, _, size = features.shape
        rounds, at = self._plain.get(first_row, (None, 0))
        if rounds is None or rounds.shape[1] < n:
            rounds = np.empty((HELD, n, 1, size), np.float32)
        self._plain[first_row] = rounds, (at + 1) % HELD
        ours: Float32 = rounds[at, :n]
        ours[:] = features[:, :1]
        return ours

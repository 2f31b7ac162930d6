"""Profile: seconds of steps as they were measured, by rows, width and context."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

BUCKET = 64  # width of a lookup bucket, in tokens


@dataclass(frozen=True)
class CostProfile:
    """Seconds of `verify` and of `draft`; each axis rises."""

    contexts: list[int]  # cached tokens per row
    rows: list[int]  # sequences in the batch
    widths: list[int]  # tokens verified per row; 1: plain decoding
    verify_seconds: list[list[list[float]]]  # [context][rows][width]; includes ensemble overhead
    draft_seconds: list[list[float]]  # [context][rows]
    _values: dict[tuple[int, int, int], float] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def verify(self, n: int, width: int, context: int) -> float:
        return self._read(self.verify_seconds, n, width, context)

    def draft(self, n: int, context: int) -> float:
        return self._read(self.draft_seconds, n, 0, context)

    def _read(self, table: Any, n: int, width: int, context: int) -> float:
        """Interpolate linearly, extrapolate above the last point, clamp below the first."""
        key = (n, width, context // BUCKET)
        if key not in self._values:
            found = np.asarray(table, np.float64)
            points = ((self.contexts, key[2] * BUCKET), (self.rows, n), (self.widths, width))
            for axis, at in points if width else points[:2]:  # drafts have no width
                if len(axis) == 1:
                    found = found[0]
                    continue
                i = min(max(int(np.searchsorted(axis, at, "right")) - 1, 0), len(axis) - 2)
                share = max((at - axis[i]) / (axis[i + 1] - axis[i]), 0.0)
                found = found[i] + share * (found[i + 1] - found[i])
            self._values[key] = float(found)
        return self._values[key]

"""Profile: seconds of steps as they were measured, by sequences, width and context."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dflash_trt.engines import padded_size

BUCKET = 64  # width of a lookup bucket, in tokens


@dataclass(frozen=True)
class CostProfile:
    """Seconds of `verify` and of `draft`; each axis rises."""

    contexts: list[int]  # cached tokens per sequence
    sequences: list[int]  # in the batch
    widths: list[int]  # tokens verified per sequence; 1: plain decoding
    verify_seconds: list[
        list[list[float]]
    ]  # [context][sequences][width]; includes ensemble overhead
    draft_seconds: list[list[float]]  # [context][sequences]
    sampling_seconds: list[float]  # [sequences]; what sampling adds to a step
    pads_widths: bool = False  # to `few_sizes`: a step takes as long as the next of them
    _values: dict[tuple[int, int, int], float] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def verify(self, n: int, width: int, context: int) -> float:
        if self.pads_widths:
            width = padded_size(width, self.widths[-1])
        return self._read(self.verify_seconds, n, width, context)

    def sampling(self, n: int) -> float:
        """Return the seconds that sampling adds to `verify`."""
        return float(_interpolate(self.sampling_seconds, self.sequences, n))

    def draft(self, n: int, context: int) -> float:
        return self._read(self.draft_seconds, n, 0, context)

    def _read(self, table: Any, n: int, width: int, context: int) -> float:
        """Interpolate linearly, extrapolate above the last point, clamp below the first."""
        bucket = context // BUCKET
        key = n, width, bucket
        if key not in self._values:
            values = np.asarray(table, np.float64)
            values = _interpolate(values, self.contexts, bucket * BUCKET)
            values = _interpolate(values, self.sequences, n)
            if width:  # drafts have no width
                values = _interpolate(values, self.widths, width)
            self._values[key] = float(values)
        return self._values[key]


def _interpolate(values: Any, axis: list[int], point: int) -> Any:
    """Return the values at a point of the first axis."""
    if len(axis) == 1:
        return values[0]
    index = int(np.searchsorted(axis, point, "right")) - 1
    index = min(max(index, 0), len(axis) - 2)
    share = max((point - axis[index]) / (axis[index + 1] - axis[index]), 0.0)
    return values[index] + share * (values[index + 1] - values[index])

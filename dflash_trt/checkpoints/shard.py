"""What one rank of several holds of a tensor: a range along one of its axes."""

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from dflash_trt.checkpoints.gguf import Packed
from dflash_trt.checkpoints.quantized import Quantized
from dflash_trt.checkpoints.stored import DTYPES, Stored


class Shard(NamedTuple):
    """Entries `start .. stop-1` of an axis."""

    axis: int
    start: int
    stop: int


@dataclass(frozen=True)
class TensorSlice:
    """A range of a tensor that does not lie in its file in one piece."""

    whole: Stored | Quantized | Packed
    shard: Shard

    @property
    def shape(self) -> tuple[int, ...]:
        axis, start, stop = self.shard
        return (*self.whole.shape[:axis], stop - start, *self.whole.shape[axis + 1 :])

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def dtype(self) -> str:
        return self.whole.dtype

    def read(self, start: int = 0, count: int | None = None) -> np.ndarray[Any, Any]:
        """`count` elements from `start` on, flat; all by default. Whole entries of the first axis.

        What is around them is read, too: the rows of a plain tensor, the matrix of a quantised one.
        """
        entry, whole = math.prod(self.shape[1:]), self.whole
        axis, low, high = self.shard
        first, last = start // entry, (self.size if count is None else start + count) // entry
        if axis == 0:
            first, last = first + low, last + low
        if isinstance(whole, Quantized) and len(whole.shape) == 2:
            entries = whole.read().reshape(whole.shape)[first:last]
        else:
            size = math.prod(whole.shape[1:])
            entries = whole.read(first * size, (last - first) * size)
            entries = entries.reshape(-1, *whole.shape[1:])
        inside = (slice(None),) * axis + (slice(low, high),) if axis else ()
        return entries[inside].reshape(-1)


def take_shard(tensor: Stored | Quantized | Packed, shard: Shard) -> Stored | TensorSlice:
    """That range of a tensor, as a tensor; nothing is read."""
    if not isinstance(tensor, Stored) or shard.axis:
        return TensorSlice(tensor, shard)
    row = math.prod(tensor.shape[1:]) * DTYPES[tensor.dtype].itemsize
    shape = (shard.stop - shard.start, *tensor.shape[1:])
    return replace(tensor, offset=tensor.offset + shard.start * row, shape=shape)

"""Matrices of a GGUF file: blocks of integers, and what they stand for."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dflash_trt.weights.gguf.header import library
from dflash_trt.weights.stored import DTYPES, Stored

PLAIN = ("F32", "F16", "BF16")
BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}  # formats that `Packed.blocks` supports
BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}


class Blocks(NamedTuple):
    """Rows of a matrix: (codes - zeros) * scales + offsets."""

    codes: npt.NDArray[np.int8]  # [r, in / 32, 32]
    scales: npt.NDArray[np.float32]  # [r, in / 32, 1]
    offsets: npt.NDArray[np.float32] | None = None  # shaped as scales; None: nothing to add
    zeros: npt.NDArray[np.int8] | None = None  # shaped as scales; None: zero


@dataclass(frozen=True)
class Packed(Stored):
    """A matrix whose rows are llama.cpp blocks, read as float32, or permuted as in llama.cpp."""

    kind: str  # name of the format
    block: tuple[int, int]  # numbers per block, and bytes
    heads: int | None = None  # for tensors in `TURNED`

    def read(self, start: int = 0, count: int | None = None) -> npt.NDArray[Any]:
        """Return `count` numbers from `start` on, flat; all by default. Whole rows only."""
        width = self.shape[-1]
        end = self.size if count is None else start + count
        rows = self.rows(start // width, end // width)
        if self.kind in PLAIN:
            numbers: npt.NDArray[Any] = rows.view(DTYPES[self.kind])
            return numbers.reshape(-1)
        gguf = library()
        with np.errstate(all="ignore"):  # infinity if a scale overflows, as in other readers
            numbers = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[self.kind])
        return numbers.reshape(-1)

    def blocks(self, first: int, last: int) -> Blocks:
        """Return rows `first .. last-1` of a format in `BITS`."""
        return unpacked(self.rows(first, last), self.kind)

    def rows(self, first: int, last: int) -> npt.NDArray[np.uint8]:
        """Return rows `first .. last-1` as stored blocks: `[rows, bytes]`."""
        if self.heads is None:
            return self._stored(first, last)
        head_dim = self.shape[0] // self.heads
        start = first // head_dim * head_dim
        stop = -(-last // head_dim) * head_dim
        stored = self._stored(start, stop)
        halves = stored.reshape(-1, head_dim // 2, 2, stored.shape[1]).swapaxes(1, 2)
        return halves.reshape(stored.shape)[first - start : last - start]

    def _stored(self, first: int, last: int) -> npt.NDArray[np.uint8]:
        width = self.shape[-1] // self.block[0] * self.block[1]
        size = math.prod(self.shape[:-1]) * width
        stored = Stored(self.name, self.file, self.offset, (size,), "U8")
        return stored.read(first * width, (last - first) * width).reshape(-1, width)


def unpacked(rows: npt.NDArray[np.uint8], kind: str) -> Blocks:
    """Unpack rows `[r, bytes]` of a format in `BITS`."""
    blocks = rows.reshape(len(rows), -1, BLOCK_BYTES[kind])
    scales = blocks[..., :2].view(np.float16).astype(np.float32)
    if kind == "Q8_0":
        return Blocks(blocks[..., 2:].view(np.int8), scales)
    halves = blocks[..., -16:]
    codes = np.concatenate([halves & 15, halves >> 4], axis=-1).view(np.int8) - np.int8(8)
    if kind == "Q4_0":
        return Blocks(codes, scales)
    offsets = blocks[..., 2:4].view(np.float16).astype(np.float32)  # for codes from 0 to 15
    with np.errstate(all="ignore"):  # infinity if a scale is, as in other readers
        return Blocks(codes, scales, offsets + 8 * scales)

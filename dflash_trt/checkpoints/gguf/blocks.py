"""Blocks of GGUF that are stored as ours are: 32 integers of one scale (`graphs/quantised.py`)."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}


class Blocks(NamedTuple):
    """Rows of a matrix: (codes - zeros) * scales + offsets."""

    codes: npt.NDArray[np.int8]  # [r, in / 32, 32]
    scales: npt.NDArray[np.float32]  # [r, in / 32, 1]
    offsets: npt.NDArray[np.float32] | None = None  # as scales; None: nothing to add
    zeros: npt.NDArray[np.int8] | None = None  # as scales; None: codes are counted from 0


def unpacked(rows: npt.NDArray[np.uint8], kind: str) -> Blocks:
    """Rows of a format of `BITS` `[r, bytes]`."""
    size = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}[kind]
    blocks = rows.reshape(len(rows), -1, size)
    scales = blocks[..., :2].view(np.float16).astype(np.float32)
    if kind == "Q8_0":
        return Blocks(blocks[..., 2:].view(np.int8), scales)
    halves = blocks[..., -16:]
    codes = np.concatenate([halves & 15, halves >> 4], axis=-1).view(np.int8) - np.int8(8)
    if kind == "Q4_0":
        return Blocks(codes, scales)
    least = blocks[..., 2:4].view(np.float16).astype(np.float32)  # of codes from 0 to 15
    with np.errstate(all="ignore"):  # infinity where a scale is, as elsewhere
        return Blocks(codes, scales, least + 8 * scales)

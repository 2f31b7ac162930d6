"""Weight-only quantization: blocks of 32 inputs share a scale (ONNX Runtime runs them packed)."""

from collections.abc import Callable, Iterator

import ml_dtypes
import numpy as np
import numpy.typing as npt

from dflash_trt.checkpoints.gguf import Blocks

BLOCK = 32
Array = npt.NDArray[np.generic]
Pieces = Callable[[], Iterator[Blocks]]  # rows of a matrix [out, in], in order


def codes(pieces: Pieces, shape: tuple[int, int], bits: int) -> Array:
    """The matrix transposed, `[in, out]`, as integers of `bits` bits: int8, or int4."""
    found = _transposed((blocks.codes for blocks in pieces()), np.empty(shape, np.int8))
    return found if bits == 8 else found.astype(ml_dtypes.int4)


def packed(integers: Array) -> Array:
    """int4 as bytes, two in each, the first in its low half (ONNX)."""
    halves = integers.reshape(-1).view(np.uint8) & 15
    found: Array = halves[::2] | halves[1::2] << 4
    return found


def scales(pieces: Pieces, shape: tuple[int, int]) -> Array:
    """What a code of each block counts, float32 `[in / 32, out]`."""
    found = np.empty((shape[0] // BLOCK, shape[1]), np.float32)
    return _transposed((blocks.scales for blocks in pieces()), found)


def offsets(pieces: Pieces, shape: tuple[int, int]) -> Array:
    """What is added to each number of a block, float32 `[in / 32, out]`."""
    found = np.empty((shape[0] // BLOCK, shape[1]), np.float32)
    none = np.float32(0)
    return _transposed(
        (b.scales * none if b.offsets is None else b.offsets for b in pieces()), found
    )


def rounded(rows: npt.NDArray[np.float32], bits: int) -> Blocks:
    """Rows `[r, in]` as blocks.

    The integers reach one further below 0 than above, and the scales, which TensorRT wants to be
    positive, make use of that.
    """
    blocks, least = rows.reshape(len(rows), -1, BLOCK), -(1 << bits - 1)
    high, low = blocks.max(-1, keepdims=True), blocks.min(-1, keepdims=True)
    scale = np.maximum(high / (-least - 1), low / least)
    scale = np.where(scale > 0, scale, 1)
    return Blocks(np.rint(blocks / scale).clip(least, -least - 1).astype(np.int8), scale)


def _transposed(pieces: Iterator[Array], found: Array) -> Array:
    column = 0
    for rows in pieces:
        found[:, column : column + len(rows)] = rows.reshape(len(rows), -1).T
        column += len(rows)
    return found

"""Weight-only quantisation: blocks of 32 inputs share a scale (ONNX Runtime runs them packed)."""

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import numpy.typing as npt

BLOCK = 32
Array = npt.NDArray[np.generic]
Pieces = Iterator[npt.NDArray[np.float32]]  # rows [r, in] of a matrix [out, in], in order


def codes(pieces: Pieces, shape: tuple[int, int], bits: int) -> Array:
    """The matrix transposed, `[in, out]`, as integers of `bits` bits: int8, or int4."""
    found, column = np.empty(shape, np.int8), 0
    least = -(1 << bits - 1)
    for rows in pieces:
        blocks, scale = _scaled(rows, bits)
        values = np.rint(blocks / scale).clip(least, -least - 1)
        found[:, column : column + len(rows)] = values.astype(np.int8).reshape(rows.shape).T
        column += len(rows)
    return found if bits == 8 else found.astype(ml_dtypes.int4)


def packed(integers: Array) -> Array:
    """int4 as bytes, two in each, the first in its low half (ONNX)."""
    halves = integers.reshape(-1).view(np.uint8) & 15
    found: Array = halves[::2] | halves[1::2] << 4
    return found


def scales(pieces: Pieces, shape: tuple[int, int], bits: int) -> Array:
    """What a code of each block counts, float32 `[in / 32, out]`."""
    found, column = np.empty((shape[0] // BLOCK, shape[1]), np.float32), 0
    for rows in pieces:
        found[:, column : column + len(rows)] = _scaled(rows, bits)[1][..., 0].T
        column += len(rows)
    return found


def _scaled(
    rows: npt.NDArray[np.float32], bits: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Blocks `[r, in / 32, 32]` and their scales `[r, in / 32, 1]`.

    The integers reach one further below 0 than above, and the scales, which TensorRT wants to be
    positive, make use of that.
    """
    blocks, least = rows.reshape(len(rows), -1, BLOCK), -(1 << bits - 1)
    high, low = blocks.max(-1, keepdims=True), blocks.min(-1, keepdims=True)
    scale = np.maximum(high / (-least - 1), low / least)
    return blocks, np.where(scale > 0, scale, 1)

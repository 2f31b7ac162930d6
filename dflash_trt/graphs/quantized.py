"""Quantized linear layers: blocks of 32 inputs share a scale, or all inputs of an output do."""

from collections.abc import Iterable
from typing import NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from dflash_trt.weights import Blocks

BLOCK = 32
LARGEST_FP8 = np.float32(448)  # of e4m3
SHRUNK = (1, 0.95, 0.9, 0.85, 0.8)  # clipping the largest weights may fit the others better
Array = npt.NDArray[np.generic]
Floats = npt.NDArray[np.float32]


class Matrix(NamedTuple):
    """A transposed matrix `[in, out]`, and its blocks' values `[blocks, out]` (`Blocks`)."""

    codes: npt.NDArray[np.int8]
    scales: Floats
    offsets: Floats
    zeros: npt.NDArray[np.int8]


def join_transposed(pieces: Iterable[Blocks], shape: tuple[int, int], blocks: int) -> Matrix:
    """Transpose rows of a matrix `[out, in]`, given in order; `shape` is `[in, out]`."""
    small = (blocks, shape[1])
    matrix = Matrix(
        codes=np.empty(shape, np.int8),
        scales=np.zeros(small, np.float32),
        offsets=np.zeros(small, np.float32),
        zeros=np.zeros(small, np.int8),
    )
    first = 0
    for piece in pieces:
        last = first + len(piece.codes)
        parts: Iterable[tuple[Array, Array | None]] = zip(matrix, piece, strict=True)
        for whole, part in parts:
            if part is not None:
                whole[:, first:last] = part.reshape(len(part), -1).T
        first = last
    return matrix


def pack_int4(integers: Array) -> Array:
    """Pack 4-bit integers into bytes, the first of two in the low half (ONNX)."""
    halves = integers.reshape(-1).view(np.uint8) & 15
    halves = np.append(halves, np.zeros(len(halves) % 2, np.uint8))
    return halves[::2] | halves[1::2] << 4


def quantize_rows(rows: Floats, bits: int) -> Blocks:
    """Quantize rows `[r, in]` to blocks; with 4 bits they have zero points."""
    blocks = rows.reshape(len(rows), -1, BLOCK)
    return _quantize_to_8_bits(blocks) if bits == 8 else _quantize_to_4_bits(blocks)


def quantize_to_fp8(rows: Floats) -> tuple[Array, Floats]:
    """Quantize rows `[r, in]` to e4m3; return them and a scale for each row."""
    scales = np.abs(rows).max(-1) / LARGEST_FP8
    scales = np.where(scales > 0, scales, np.float32(1))
    return (rows / scales[:, None]).astype(ml_dtypes.float8_e4m3fn), scales


def quantize_to_7_bits(rows: Floats) -> Blocks:
    """Quantize rows `[r, in]`, one block each, so that CPUs without VNNI multiply them exactly.

    These add two products with 8-bit inputs in 16 bits.
    """
    blocks = rows[:, None]
    scale = np.abs(blocks).max(-1, keepdims=True) / 63
    scale = np.where(scale > 0, scale, 1)
    return Blocks(np.rint(blocks / scale).astype(np.int8), scale)


def _quantize_to_8_bits(blocks: Floats) -> Blocks:
    """Quantize to 8 bits, with scales that use the extra integer below 0."""
    high = blocks.max(-1, keepdims=True)
    low = blocks.min(-1, keepdims=True)
    scale = np.maximum(high / 127, low / -128)
    scale = np.where(scale > 0, scale, 1)
    return Blocks(np.rint(blocks / scale).clip(-128, 127).astype(np.int8), scale)


def _quantize_to_4_bits(blocks: Floats) -> Blocks:
    """Quantize to 4 bits by the range with the smallest squared error, and its best scale."""
    high = blocks.max(-1, keepdims=True).clip(0)
    low = blocks.min(-1, keepdims=True).clip(None, 0)
    smallest = np.full_like(high, np.inf)
    codes = np.zeros(blocks.shape, np.int8)
    scales = np.ones_like(high)
    zero_points = np.zeros(high.shape, np.int8)
    for share in SHRUNK:
        scale = (high - low) * np.float32(share / 15)
        scale = np.where(scale > 0, scale, 1)
        zeros = np.rint(-8 - low * np.float32(share) / scale).clip(-8, 7)
        counts = np.rint(blocks / scale).clip(-8 - zeros, 7 - zeros)
        squares = (counts * counts).sum(-1, keepdims=True)
        fitted = (blocks * counts).sum(-1, keepdims=True) / np.where(squares > 0, squares, 1)
        scale = np.where(fitted > 0, fitted, scale)
        error = np.square(blocks - counts * scale).sum(-1, keepdims=True)
        better = error < smallest
        np.copyto(codes, (counts + zeros).astype(np.int8), where=better)
        np.copyto(scales, scale, where=better)
        np.copyto(zero_points, zeros.astype(np.int8), where=better)
        smallest = np.minimum(error, smallest)
    return Blocks(codes, scales, None, zero_points)


def widen_to_8_bits(blocks: Blocks) -> Blocks:
    """Convert blocks of 4 bits with offsets to blocks of 8 bits with zero points.

    A step is divided into at most 17, the number that makes the offset nearly a multiple: the error
    is 0.7 % of a step (root mean square), a fortieth of that of 4 bits. ONNX Runtime has a kernel
    for that, and none for offsets.
    """
    assert blocks.offsets is not None
    lowest = blocks.offsets / blocks.scales - 8  # of code -8, in steps
    cuts = np.zeros_like(lowest)
    smallest = np.full_like(lowest, np.inf)
    for cut in range(17, 0, -1):
        first = np.rint(lowest * cut)
        span = (first + 15 * cut).clip(0) - first.clip(None, 0)
        error = np.where(span <= 255, np.abs(first / cut - lowest), np.inf)
        cuts = np.where(error < smallest, cut, cuts)
        smallest = np.minimum(error, smallest)
    fits = cuts > 0
    cuts = np.where(fits, cuts, 1)
    first = np.rint(np.where(fits, lowest, 0) * cuts)
    zeros = -128 - first.clip(None, 0)
    codes = (blocks.codes + np.float32(8)) * cuts + first + zeros
    plain = _quantize_to_8_bits(blocks.codes * blocks.scales + blocks.offsets)  # far from 0
    return Blocks(
        np.where(fits, codes, plain.codes).astype(np.int8),
        np.where(fits, blocks.scales / cuts, plain.scales),
        None,
        np.where(fits, zeros, 0).astype(np.int8),
    )

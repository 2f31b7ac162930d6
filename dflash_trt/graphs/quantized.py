"""Quantized linear layers: integers in blocks that share a scale."""

from collections.abc import Iterable
from typing import NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

BLOCK = 32  # weights that share a scale, where we quantize
LARGEST_FP8 = np.float32(448)  # of e4m3
SHRUNK = (1, 0.95, 0.9, 0.85, 0.8)  # clipping the largest weights may fit the others better
Array = npt.NDArray[np.generic]
Bytes = npt.NDArray[np.uint8]
Codes = npt.NDArray[np.int8]
Floats = npt.NDArray[np.float32]


class Rows(NamedTuple):
    """Rows of a matrix in blocks: (codes - zeros) * scales + offsets."""

    codes: Codes  # [r, in / block, block]
    scales: Floats  # [r, in / block]
    offsets: Floats | None = None  # shaped as scales; None: nothing to add
    zeros: Codes | None = None  # shaped as scales; None: zero


class PackedRows(NamedTuple):
    """The same, as ONNX Runtime's quantized products read them."""

    codes: Bytes  # [r, in / block, block * bits / 8]
    scales: Floats  # [r, in / block]
    offsets: Floats | None
    zeros: Bytes | None  # [r, bytes of in / block zeros]


class ScaledColumns(NamedTuple):
    codes: Codes  # [in, out]
    scales: Floats  # [1, out]


def pack_rows(rows: Rows, bits: int) -> PackedRows:
    zeros = None if rows.zeros is None else _pack(rows.zeros, bits)
    return PackedRows(_pack(rows.codes, bits), rows.scales, rows.offsets, zeros)


def _pack(codes: Codes, bits: int) -> Bytes:
    """Pack codes `[..., k]` as numbers from 0 on, the first of two with 4 bits in the low half."""
    from_zero = codes.view(np.uint8) + np.uint8(1 << bits - 1)
    if bits == 8:
        return from_zero
    from_zero &= 15
    if from_zero.shape[-1] % 2:
        from_zero = np.concatenate([from_zero, np.zeros_like(from_zero[..., :1])], axis=-1)
    return from_zero[..., ::2] | from_zero[..., 1::2] << np.uint8(4)


def join_rows(pieces: Iterable[PackedRows]) -> PackedRows:
    """Concatenate rows, all with offsets and zeros or none."""
    codes, scales, offsets, zeros = zip(*pieces, strict=True)
    return PackedRows(
        np.concatenate(codes),
        np.concatenate(scales),
        None if offsets[0] is None else np.concatenate(offsets),
        None if zeros[0] is None else np.concatenate(zeros),
    )


def quantize_rows(rows: Floats, bits: int) -> Rows:
    """Quantize rows `[r, in]` to blocks of 32; with 4 bits they have zero points."""
    blocks = rows.reshape(len(rows), -1, BLOCK)
    return _quantize_to_8_bits(blocks) if bits == 8 else _quantize_to_4_bits(blocks)


def quantize_to_fp8(rows: Floats) -> tuple[Array, Floats]:
    """Quantize rows `[r, in]` to e4m3; return them and a scale for each row."""
    scales = np.abs(rows).max(-1) / LARGEST_FP8
    scales = np.where(scales > 0, scales, np.float32(1))
    return (rows / scales[:, None]).astype(ml_dtypes.float8_e4m3fn), scales


def quantize_to_7_bits(rows: Floats) -> ScaledColumns:
    """Quantize rows `[r, in]`, one block each, so that CPUs without VNNI multiply them exactly.

    These add two products with 8-bit inputs in 16 bits.
    """
    scale = np.abs(rows).max(-1, keepdims=True) / 63
    scale = np.where(scale > 0, scale, 1)
    return ScaledColumns(np.rint(rows / scale).astype(np.int8).T, scale.T)


def _quantize_to_8_bits(blocks: Floats) -> Rows:
    """Quantize to 8 bits, with scales that use the extra integer below 0."""
    high = blocks.max(-1, keepdims=True)
    low = blocks.min(-1, keepdims=True)
    scale = np.maximum(high / 127, low / -128)
    scale = np.where(scale > 0, scale, 1)
    return Rows(np.rint(blocks / scale).clip(-128, 127).astype(np.int8), scale[..., 0])


def _quantize_to_4_bits(blocks: Floats) -> Rows:
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
    return Rows(codes, scales[..., 0], None, zero_points[..., 0])

"""Matrices of a GGUF file: blocks of integers, and what they stand for."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from dflash_trt.weights.gguf.header import library
from dflash_trt.weights.stored import DTYPES, Stored

PLAIN = ("F32", "F16", "BF16")
# values of a 4-bit code in IQ4_NL and IQ4_XS, and twice those of e2m1 (llama.cpp's ggml-common.h)
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)

Bytes = npt.NDArray[np.uint8]
Codes = npt.NDArray[np.int8]
Floats = npt.NDArray[np.float32]


class Blocks(NamedTuple):
    """Rows of a matrix: (codes + shift) * scales + offsets; the shift is the format's (`Form`)."""

    codes: Codes  # [r, in / block, block]
    scales: Floats  # [r, in / block]
    offsets: Floats | None = None  # shaped as scales; None: nothing to add


class Form(NamedTuple):
    """How our quantized graphs keep the blocks of a format."""

    bits: Literal[4, 8]  # of a code
    block: int  # weights that share a scale
    shift: int = 0  # of codes that the format counts from 0 on: its blocks have offsets

    @property
    def has_offsets(self) -> bool:
        return self.shift > 0

    @property
    def bits_per_weight(self) -> float:
        """With its share of a scale and an offset in float32."""
        return self.bits + 32 * (1 + self.has_offsets) / self.block


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

    @property
    def form(self) -> Form | None:
        """How `blocks` returns this format; None: it can only be dequantized."""
        return FORMS.get(self.kind)

    @property
    def stored_bytes(self) -> int:
        numbers, size = self.block
        return self.size // numbers * size

    def blocks(self, first: int, last: int) -> Blocks:
        """Return rows `first .. last-1` of a format in `FORMS`."""
        return unpacked(self.rows(first, last), self.kind)

    def rows(self, first: int, last: int) -> Bytes:
        """Return rows `first .. last-1` as stored blocks: `[rows, bytes]`."""
        if self.heads is None:
            return self._stored(first, last)
        head_dim = self.shape[0] // self.heads
        start = first // head_dim * head_dim
        stop = -(-last // head_dim) * head_dim
        stored = self._stored(start, stop)
        halves = stored.reshape(-1, head_dim // 2, 2, stored.shape[1]).swapaxes(1, 2)
        return halves.reshape(stored.shape)[first - start : last - start]

    def _stored(self, first: int, last: int) -> Bytes:
        width = self.shape[-1] // self.block[0] * self.block[1]
        size = math.prod(self.shape[:-1]) * width
        stored = Stored(self.name, self.file, self.offset, (size,), "U8")
        return stored.read(first * width, (last - first) * width).reshape(-1, width)


def unpacked(rows: Bytes, kind: str) -> Blocks:
    """Unpack rows `[r, bytes]` of a format in `FORMS`, to the very numbers that `gguf` reads."""
    size = library().GGML_QUANT_SIZES[library().GGMLQuantizationType[kind]][1]
    with np.errstate(all="ignore"):  # infinity if a scale is, as in other readers
        blocks = _UNPACK[kind](rows.reshape(-1, size))
    width = FORMS[kind].block
    return Blocks(
        blocks.codes.reshape(len(rows), -1, width),
        blocks.scales.reshape(len(rows), -1),
        None if blocks.offsets is None else blocks.offsets.reshape(len(rows), -1),
    )


def _halves(column: Bytes) -> Floats:
    """Return float16 numbers of two bytes each as float32."""
    return np.ascontiguousarray(column).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """Return the low halves of bytes `[..., k]`, then the high ones: `[..., 2 * k]`."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _shifted(codes: Bytes, shift: int) -> Codes:
    """Return codes from 0 on, so shifted that they lie around 0."""
    return codes.view(np.int8) - np.int8(shift)


def _q4_0(blocks: Bytes) -> Blocks:
    return Blocks(_shifted(_nibbles(blocks[:, 2:]), 8), _halves(blocks[:, :2]))


def _q4_1(blocks: Bytes) -> Blocks:
    codes = _shifted(_nibbles(blocks[:, 4:]), 8)
    return Blocks(codes, _halves(blocks[:, :2]), _halves(blocks[:, 2:4]))


def _fifth_bits(packed: Bytes) -> Bytes:
    """Return 32 bits of each row `[b, 4]`, at the place of a code's fifth: `[b, 32]`."""
    return np.unpackbits(packed, axis=-1, bitorder="little") << np.uint8(4)


def _q5_0(blocks: Bytes) -> Blocks:
    codes = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return Blocks(_shifted(codes, 16), _halves(blocks[:, :2]))


def _q5_1(blocks: Bytes) -> Blocks:
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return Blocks(_shifted(codes, 16), _halves(blocks[:, :2]), _halves(blocks[:, 2:4]))


def _q8_0(blocks: Bytes) -> Blocks:
    return Blocks(blocks[:, 2:].view(np.int8), _halves(blocks[:, :2]))


def _scales_and_minima(blocks: Bytes) -> tuple[Floats, Floats]:
    """Return scales and offsets `[b, 8]` of Q4_K and Q5_K, of 6 bits each in 12 bytes."""
    packed = blocks[:, 4:16].reshape(-1, 3, 4)
    low, middle, high = packed[:, 0], packed[:, 1], packed[:, 2]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=-1)
    minima = np.concatenate([middle & 63, (high >> 4) | (middle >> 6 << 4)], axis=-1)
    return _halves(blocks[:, :2]) * scales, -(_halves(blocks[:, 2:4]) * minima)


def _pairs_of_nibbles(packed: Bytes) -> Bytes:
    """Return codes `[b, 8, 32]` of 4 * 32 bytes: low halves of 32 bytes, then high ones."""
    return _nibbles(packed.reshape(-1, 4, 32)).reshape(-1, 8, 32)


def _q4_k(blocks: Bytes) -> Blocks:
    codes = _shifted(_pairs_of_nibbles(blocks[:, 16:]), 8)
    return Blocks(codes, *_scales_and_minima(blocks))


def _q5_k(blocks: Bytes) -> Blocks:
    fifth = _bits_at(blocks[:, 16:48], range(8), 1) << np.uint8(4)
    codes = _pairs_of_nibbles(blocks[:, 48:]) | fifth
    return Blocks(_shifted(codes, 16), *_scales_and_minima(blocks))


def _bits_at(packed: Bytes, shifts: range, mask: int) -> Bytes:
    """Return the bits of bytes `[b, ..., k]` that begin at each shift: `[b, ..., shifts, k]`."""
    places = np.array(shifts, np.uint8)[:, None]
    return (packed[..., None, :] >> places) & np.uint8(mask)


def _two_bits(packed: Bytes) -> Bytes:
    """Return codes `[b, 256]` of 2 * 32 bytes, four in each: the lowest of 32 bytes first."""
    return _bits_at(packed.reshape(-1, 2, 32), range(0, 8, 2), 3).reshape(-1, 256)


def _q2_k(blocks: Bytes) -> Blocks:
    packed = blocks[:, :16]
    scales = _halves(blocks[:, 80:82]) * (packed & 15)
    offsets = -(_halves(blocks[:, 82:84]) * (packed >> 4))
    return Blocks(_shifted(_two_bits(blocks[:, 16:80]), 2), scales, offsets)


def _q3_k(blocks: Bytes) -> Blocks:
    high = _bits_at(blocks[:, :32], range(8), 1).reshape(-1, 256)
    codes = _shifted(_two_bits(blocks[:, 32:96]) | high << np.uint8(2), 4)
    packed = blocks[:, 96:108].reshape(-1, 3, 4)
    low = _nibbles(packed[:, :2].reshape(-1, 8))  # of 16 scales
    top = _bits_at(packed[:, 2], range(0, 8, 2), 3).reshape(-1, 16) << np.uint8(4)
    scales = _halves(blocks[:, 108:]) * _shifted(low | top, 32)
    return Blocks(codes, scales)


def _q6_k(blocks: Bytes) -> Blocks:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 256)
    codes = _shifted(low | _two_bits(blocks[:, 128:192]) << np.uint8(4), 32)
    return Blocks(codes, _halves(blocks[:, 208:]) * blocks[:, 192:208].view(np.int8))


def _iq4_nl(blocks: Bytes) -> Blocks:
    codes = np.array(IQ4_VALUES, np.int8)[_nibbles(blocks[:, 2:])]
    return Blocks(codes, _halves(blocks[:, :2]))


def _iq4_xs(blocks: Bytes) -> Blocks:
    codes = np.array(IQ4_VALUES, np.int8)[_nibbles(blocks[:, 8:].reshape(-1, 8, 16))]
    low = _bits_at(blocks[:, 4:8, None], range(0, 8, 4), 15).reshape(-1, 8)
    high = _bits_at(blocks[:, 2:4, None], range(0, 8, 2), 3).reshape(-1, 8) << np.uint8(4)
    return Blocks(codes, _halves(blocks[:, :2]) * _shifted(low | high, 32))


def _mxfp4(blocks: Bytes) -> Blocks:
    codes = np.array(E2M1_DOUBLED, np.int8)[_nibbles(blocks[:, 1:])]
    exponents = blocks[:, :1].astype(np.int32) - 128  # of half a power of two, as codes are doubled
    return Blocks(codes, np.ldexp(np.float32(1), exponents))


_UNPACK: dict[str, Callable[[Bytes], Blocks]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
FORMS = {
    "Q4_0": Form(bits=4, block=32),
    "Q4_1": Form(bits=4, block=32, shift=8),
    "Q5_0": Form(bits=8, block=32),
    "Q5_1": Form(bits=8, block=32, shift=16),
    "Q8_0": Form(bits=8, block=32),
    "Q2_K": Form(bits=4, block=16, shift=2),
    "Q3_K": Form(bits=4, block=16),
    "Q4_K": Form(bits=4, block=32, shift=8),
    "Q5_K": Form(bits=8, block=32, shift=16),
    "Q6_K": Form(bits=8, block=16),
    "IQ4_NL": Form(bits=8, block=32),
    "IQ4_XS": Form(bits=8, block=32),
    "MXFP4": Form(bits=8, block=32),
}

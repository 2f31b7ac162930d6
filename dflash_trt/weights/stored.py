"""Stored tensors of safetensors files, and dequantization of FP8, MXFP4 and NVFP4.

In every quantized layout a code of 8 or 4 bits is multiplied by the scale of its block:
- FP8 (`fp8`, ModelOpt): NAME in e4m3, and NAME_scale_inv or NAME_scale with one scale for the
  tensor, each row or each block.
- MXFP4 (gpt-oss): NAME_blocks, two e2m1 a byte, and NAME_scales, a power of two for each 32.
- NVFP4 (ModelOpt): NAME, two e2m1 a byte, and NAME_scale, an e4m3 for each 16. NAME_scale_2
  multiplies all scales.

Scales of activations and of the KV cache are ignored: only weights are quantized here.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, Field, ValidationError
from safetensors import SafetensorError, safe_open

from dflash_trt.errors import CheckpointError
from dflash_trt.weights.json_file import read_json

# dtypes of the format that our readers support
DTYPES: dict[str, Any] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "U8": np.dtype(np.uint8),
    "I64": np.dtype(np.int64),
    "BOOL": np.dtype(np.bool_),
}
EXPORT_CHECKPOINT = "Download or export the checkpoint again"
INSTEAD = "Use the model's bf16 checkpoint, or one in FP8, MXFP4 or NVFP4"

Floats = npt.NDArray[np.float32]
Size = Annotated[int, Field(ge=1)]
Block = tuple[Size, Size]  # rows and columns that share a scale

MODELOPT_FILE = "hf_quant_config.json"
# methods and variants of quantization that are read
LAYOUTS = {("fp8", None), ("fp8", "e4m3"), ("fp8", "float8_e4m3fn"), ("mxfp4", None)}
LAYOUTS |= {("modelopt", None), ("modelopt", "FP8"), ("modelopt", "NVFP4")}  # None: the cache only
ACTIVATIONS = ("input_scale", "activation_scale")
CACHE = (".k_scale", ".v_scale", ".kv_scale", ".q_scale", ".output_scale")
CHUNK = 1 << 18  # numbers converted at a time; fits the CPU cache
_BYTES = np.arange(256, dtype=np.uint8)
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
# values of a byte: one number, or two with the low bits first
FP8 = _BYTES.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
FP4 = np.stack([_E2M1[_BYTES & 15], _E2M1[_BYTES >> 4]], axis=1).view(np.complex64)[:, 0]


class Span(NamedTuple):
    file: Path
    offset: int
    size: int

    def read(self, buffers: Iterator[memoryview]) -> Iterator[memoryview]:
        """Yield chunks, each in the next buffer."""
        left = self.size
        try:
            with self.file.open("rb", buffering=0) as stream:
                stream.seek(self.offset)
                while left:
                    chunk = next(buffers)[:left]
                    count = stream.readinto(chunk)
                    if not count:
                        raise CheckpointError(
                            f"{self.file} ends inside a tensor", EXPORT_CHECKPOINT
                        )
                    left -= count
                    yield chunk[:count]
        except OSError as error:
            raise CheckpointError(
                f"cannot read {self.file}: {error.strerror}", EXPORT_CHECKPOINT
            ) from error


@dataclass(frozen=True)
class Stored:
    name: str
    file: Path
    offset: int  # bytes from the start of the file
    shape: tuple[int, ...]
    dtype: str  # the format's name

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def read(self, start: int = 0, count: int | None = None) -> np.ndarray[Any, Any]:
        """Return `count` elements from `start` on, flat; all by default."""
        dtype = DTYPES[self.dtype]
        if count is None:
            count = self.size - start
        offset = self.offset + start * dtype.itemsize
        try:
            values = np.fromfile(self.file, dtype, count, offset=offset)
        except OSError as error:
            raise CheckpointError(
                f"cannot read {self.file}: {error.strerror}", EXPORT_CHECKPOINT
            ) from error
        if values.size != count:
            raise CheckpointError(f"{self.file} ends inside tensor {self.name}", EXPORT_CHECKPOINT)
        return values


def read_header(file: Path) -> dict[str, Stored]:
    """Return the tensors of a safetensors file by name; CheckpointError for an invalid header."""
    try:
        if not file.is_file():  # a pipe would never end
            raise OSError("no such file")
        with file.open("rb") as stream:
            offset = 8 + int.from_bytes(stream.read(8), "little")
        tensors = {}
        # checks types, offsets (no gap, no overlap) and the file's length
        with safe_open(file, framework="numpy") as header:
            for name in header.offset_keys():  # in the order of their bytes
                entry = header.get_slice(name)
                dtype = str(entry.get_dtype())
                tensor = Stored(name, file, offset, tuple(entry.get_shape()), dtype)
                tensors[name] = tensor
                bits = 8 if dtype == "BOOL" else int(re.findall(r"\d+", dtype)[0])
                offset += tensor.size * bits // 8
        return tensors
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(
            f"{file} is truncated or is not a safetensors file ({error})", EXPORT_CHECKPOINT
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"cannot read {file}: {error.strerror or error}", EXPORT_CHECKPOINT
        ) from None


@dataclass(frozen=True)
class Quantized:
    """A matrix of codes, or a stack of them, with a scale per block of rows and columns."""

    codes: Stored
    scales: Stored
    block: Block
    shape: tuple[int, ...]  # of the plain tensor: [..., rows, columns], or transposed
    transposed: bool = False
    factor: Stored | None = None  # multiplies all scales

    dtype = "F32"

    @property
    def stored_names(self) -> set[str]:
        names = {self.codes.name, self.scales.name}
        if self.factor is not None:
            names.add(self.factor.name)
        return names

    def read(self, start: int = 0, count: int | None = None) -> Floats:
        """Return `count` numbers of the plain tensor from `start` on, flat; whole matrices only."""
        size = math.prod(self.shape[-2:])
        if count is None:
            count = math.prod(self.shape)
        first = start // size
        plain = np.empty((count // size, *self.shape[-2:]), np.float32)
        matrices = plain.swapaxes(1, 2) if self.transposed else plain
        number, rows, columns = matrices.shape
        table = FP8 if self.codes.dtype == "F8_E4M3" else FP4
        width = self.codes.size * columns // math.prod(self.shape)  # bytes per row
        step = max(1, CHUNK // columns)
        for i, part in np.ndindex(number, -(-rows // step)):
            row = part * step
            n = min(step, rows - row)
            codes = self.codes.read(((first + i) * rows + row) * width, n * width).view(np.uint8)
            values = np.take(table, codes).view(np.float32).reshape(n, columns)
            with np.errstate(all="ignore"):  # infinity if a scale overflows, as in other readers
                scales = self._scales(first + i, row, n, rows, columns)
                wide = self.block[1]
                values *= scales if scales.shape[1] == 1 else _widened(scales, wide, columns)
            matrices[i, row : row + n] = values
        return plain.reshape(-1)

    def codes_and_scales(self) -> tuple[npt.NDArray[np.generic], Floats]:
        """Return a matrix in e4m3 as it is stored, and scales `[rows, blocks of columns]`."""
        rows, columns = self.shape
        codes = self.codes.read().reshape(self.shape)
        return codes, self._scales(0, 0, rows, rows, columns)

    def _scales(self, matrix: int, row: int, count: int, rows: int, columns: int) -> Floats:
        """Return scales of `count` rows from `row` on: `[count, blocks of columns]`."""
        high, wide = self.block
        down = -(-rows // high)
        across = -(-columns // wide)
        first = row // high
        last = -(-(row + count) // high)
        scales = self.scales.read((matrix * down + first) * across, (last - first) * across)
        scales = _float32(scales).reshape(-1, across)
        if self.factor is not None:
            scales = scales * _float32(self.factor.read())
        return np.repeat(scales, high, axis=0)[row - first * high :][:count]


def _widened(scales: Floats, wide: int, columns: int) -> Floats:
    return np.repeat(scales, wide, axis=1)[:, :columns]


def dequantized(
    stored: Mapping[str, Stored], config: Mapping[str, Any], directory: Path
) -> dict[str, Stored | Quantized]:
    """Return plain tensors by name; CheckpointError for an unsupported layout or wrong scales."""
    quantization = _read_quantization(config, directory)
    if quantization is None:
        return dict(stored)
    plain: dict[str, Quantized] = {}
    used = set()
    for codes in stored.values():
        quantized = _quantized_tensor(codes, stored, quantization.weight_block_size)
        if quantized is None:
            continue
        name, tensor = quantized
        plain[name] = tensor
        used |= tensor.stored_names
    rest = {
        name: tensor
        for name, tensor in stored.items()
        if name not in used and not name.endswith((*ACTIVATIONS, *CACHE))
    }
    for name in sorted(rest.keys() & plain.keys()):
        raise CheckpointError(f"{directory} holds {name} twice, plain and quantized", INSTEAD)
    return {**rest, **plain}


class Quantization(BaseModel):
    quant_method: str = ""
    fmt: str | None = None  # of `fp8`
    weight_block_size: Block | None = None
    quant_algo: str | None = None  # of ModelOpt


def _read_quantization(config: Mapping[str, Any], directory: Path) -> Quantization | None:
    """Return the config's quantization, None without one; CheckpointError if unsupported."""
    stated = config.get("quantization_config")
    if not stated and (directory / MODELOPT_FILE).is_file():  # ModelOpt's place for it
        stated = read_json(directory / MODELOPT_FILE).get("quantization")
        if isinstance(stated, dict):
            stated = {"quant_method": "modelopt", **stated}
    if not stated:
        return None
    try:
        quant = Quantization.model_validate(stated)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, ("quantization_config", *first["loc"])))
        raise CheckpointError(f"{directory}: {field}: {first['msg']}", EXPORT_CHECKPOINT) from None
    method = quant.quant_method
    variant = quant.fmt or quant.quant_algo
    if (method, variant) not in LAYOUTS:
        raise CheckpointError(
            f"{directory} is quantized by {method or 'a method that it does not name'} "
            f"({variant}), which dflash-trt does not read",
            INSTEAD,
        )
    return quant


def _quantized_tensor(
    codes: Stored, stored: Mapping[str, Stored], fp8_block: Block | None
) -> tuple[str, Quantized] | None:
    """Return the name and plain tensor for these codes; None if they are not codes."""

    def beside(*names: str) -> Stored | None:
        return next((stored[name] for name in names if name in stored), None)

    name = codes.name
    shape = codes.shape
    if len(shape) < 2 or not codes.size:
        return None
    if codes.dtype == "F8_E4M3":
        scales = beside(f"{name}_scale_inv", f"{name}_scale")
        if scales is None:
            return None
        blocks = [(1, shape[-1]), (shape[-2], shape[-1])]
        if fp8_block:
            blocks.insert(0, fp8_block)
        return name, Quantized(codes, scales, _block(codes, scales, shape, blocks), shape)
    if codes.dtype != "U8":
        return None
    plain = name.removesuffix("_blocks")
    scales = beside(f"{plain}_scales")
    if plain != name and scales is not None:
        if len(shape) < 3 or shape[-1] != 16 or (scales.dtype, scales.shape) != ("U8", shape[:-1]):
            raise _mismatch(codes, scales)
        *stack, rows, groups, _ = shape
        # gpt-oss multiplies from the left
        turned = (*stack, groups * 32, rows)
        return plain, Quantized(codes, scales, (1, 32), turned, transposed=True)
    scales = beside(f"{name}_scale")
    factor = beside(f"{name}_scale_2")
    if scales and factor and factor.size == 1 and factor.dtype in DTYPES:
        shape = (*shape[:-1], shape[-1] * 2)
        block = _block(codes, scales, shape, [(1, 16)])
        return name, Quantized(codes, scales, block, shape, factor=factor)
    return None


def _block(codes: Stored, scales: Stored, shape: tuple[int, ...], blocks: list[Block]) -> Block:
    """Return the first of `blocks` whose count in `shape` matches `scales`."""
    for high, wide in blocks:
        needed = (*shape[:-2], -(-shape[-2] // high), -(-shape[-1] // wide))
        # one scale may be stored as [], [1] or [1, 1]; one per row as [rows] or [rows, 1]
        same = [n for n in needed if n != 1] == [n for n in scales.shape if n != 1]
        if same and scales.dtype in DTYPES:
            return high, wide
    raise _mismatch(codes, scales)


def _float32(values: np.ndarray[Any, Any]) -> Floats:
    """Convert scales to float32; bytes are exponents of powers of two (OCP's E8M0)."""
    if values.dtype == np.uint8:
        return np.ldexp(np.float32(1), values.astype(np.int32) - 127)
    return values.astype(np.float32)


def _mismatch(codes: Stored, scales: Stored) -> CheckpointError:
    return CheckpointError(
        f"{scales.name} ({scales.dtype} {list(scales.shape)}) in {scales.file} does not fit "
        f"{codes.name} ({codes.dtype} {list(codes.shape)})",
        EXPORT_CHECKPOINT,
    )

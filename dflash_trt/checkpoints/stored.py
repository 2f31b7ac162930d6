"""Reader of safetensors files: a validated header, and tensors on disk."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from dflash_trt.checkpoints.directory import POINTER, check_content
from dflash_trt.errors import CheckpointError
from dflash_trt.files import parse_json

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
MAX_HEADER = 16 << 20  # bytes, enough for 150,000 tensors; parsing may take 30 times as much
AGAIN = "Download or export the checkpoint again"


class Span(NamedTuple):
    """Bytes of a file."""

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
                        raise CheckpointError(f"{self.file} ends inside a tensor", AGAIN)
                    left -= count
                    yield chunk[:count]
        except OSError as error:
            raise CheckpointError(f"cannot read {self.file}: {error.strerror}", AGAIN) from error


@dataclass(frozen=True)
class Stored:
    """One tensor in a file, from its header; `dtype` is the format's name."""

    name: str
    file: Path
    offset: int  # bytes from the start of the file
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def read(self, start: int = 0, count: int | None = None) -> np.ndarray[Any, Any]:
        """Return `count` elements from `start` on, flat; all by default."""
        dtype = DTYPES[self.dtype]
        count = self.size - start if count is None else count
        at = self.offset + start * dtype.itemsize
        try:
            values = np.fromfile(self.file, dtype, count, offset=at)
        except OSError as error:
            raise CheckpointError(f"cannot read {self.file}: {error.strerror}", AGAIN) from error
        if values.size != count:
            raise CheckpointError(f"{self.file} ends inside tensor {self.name}", AGAIN)
        return values


def read_header(file: Path) -> dict[str, Stored]:
    """Return the tensors of a safetensors file by name; CheckpointError for an invalid header.

    `safe_open` checks types, offsets (no gap, no overlap) and the file's length. Further refused
    here: repeated names, tensors written as lists, shapes that only a zero makes small.
    """
    try:
        if not file.is_file():  # a pipe would never end
            raise OSError("no such file")
        with file.open("rb") as stream:
            check_content(file, stream.read(len(POINTER)))
            stream.seek(0)
            length = int.from_bytes(stream.read(8), "little")
            if MAX_HEADER < length <= file.stat().st_size:
                raise ValueError(f"its header has {length} bytes, more than any model needs")
            with safe_open(file, framework="numpy"):
                pass
            header = parse_json(stream.read(length), object_pairs_hook=_no_repeats)
        header.pop("__metadata__", None)
        return {name: _stored(name, at, file, 8 + length) for name, at in header.items()}
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(
            f"{file} is truncated or is not a safetensors file ({error})", AGAIN
        ) from error
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror or error}", AGAIN) from None


def _stored(name: str, at: Any, file: Path, data: int) -> Stored:
    if not isinstance(at, dict):
        raise ValueError(f"tensor {name!r} is not described by an object")
    shape = tuple(at["shape"])
    if math.prod(max(1, size) for size in shape) >= 1 << 48 or len(shape) > 8:
        raise ValueError(f"tensor {name!r} has the shape {list(shape)}"[:200])
    return Stored(name, file, data + at["data_offsets"][0], shape, at["dtype"])


def _no_repeats(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} stands there twice")
        found[name] = value
    return found

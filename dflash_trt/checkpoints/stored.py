"""Reader of safetensors files: a validated header, and tensors on disk."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from dflash_trt.errors import CheckpointError

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

    `safe_open` checks types, offsets (no gap, no overlap) and the file's length.
    """
    try:
        if not file.is_file():  # a pipe would never end
            raise OSError("no such file")
        with file.open("rb") as stream:
            offset = 8 + int.from_bytes(stream.read(8), "little")
        found = {}
        with safe_open(file, framework="numpy") as header:
            for name in header.offset_keys():  # in the order of their bytes
                entry = header.get_slice(name)
                shape, dtype = tuple(entry.get_shape()), str(entry.get_dtype())
                found[name] = Stored(name, file, offset, shape, dtype)
                bits = 8 if dtype == "BOOL" else int(re.findall(r"\d+", dtype)[0])
                offset += found[name].size * bits // 8
        return found
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(
            f"{file} is truncated or is not a safetensors file ({error})", AGAIN
        ) from error
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror or error}", AGAIN) from None

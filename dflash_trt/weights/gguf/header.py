"""The header of a GGUF file: metadata and where its tensors are."""

from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dflash_trt.errors import CheckpointError

CONVERT_FILE = "Download or convert the file again"
INSTEAD = "Use another model, or its safetensors"
MAX_READS = 1 << 22  # of a header, one per value: vocabularies of 256,000 need 2 million


class Header(NamedTuple):
    file: Path
    values: dict[str, Any]
    tensors: dict[str, Any]  # of `gguf.ReaderTensor`

    def wrong(self, what: str, fix: str = CONVERT_FILE) -> CheckpointError:
        return CheckpointError(f"{self.file}: {what}"[:400], fix)


def library() -> Any:
    """Return the `gguf` package; CheckpointError without it."""
    try:
        import gguf  # noqa: PLC0415
    except ImportError as error:
        raise CheckpointError(
            f"GGUF files need the Python package gguf ({error})",
            "Run: pip install 'dflash-trt[gguf]'",
        ) from error
    return gguf


def read_header(file: Path) -> Header:
    """Read a file's header; CheckpointError if it is not a valid GGUF file."""
    library()  # an extra may be missing
    return _read(file.resolve(), file.stat().st_mtime_ns if file.is_file() else 0)


@lru_cache(maxsize=1)  # takes a second; needed for the config and the weights
def _read(file: Path, _changed: int) -> Header:
    base = library().GGUFReader

    class Reader(base):  # type: ignore[misc, valid-type]
        """Reader that stops at the file's end, which the package's own does not."""

        reads = 0

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            self.reads += 1
            if self.reads > MAX_READS:
                raise ValueError(f"its header has more than {MAX_READS} values")
            return np.frombuffer(self.data, dtype, int(count), offset)

    try:
        if not file.is_file():  # a pipe would never end
            raise OSError("no such file")
        reader = Reader(file)
        if reader.byte_order != "I":
            raise ValueError("its bytes are in another order")
        values = {name: field.contents() for name, field in reader.fields.items()}
        end = reader.data_offset
        for tensor in reader.tensors:
            if tensor.data_offset < end:
                raise ValueError(f"tensor {tensor.name!r} lies behind the next one, or over it")
            if not (tensor.shape.size and tensor.n_elements):
                raise ValueError(f"tensor {tensor.name!r} has no numbers")
            end = tensor.data_offset + tensor.n_bytes
    except OSError as error:
        raise CheckpointError(
            f"cannot read {file}: {error.strerror or error}", "Give the path of a GGUF file"
        ) from error
    except (ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
        raise CheckpointError(
            f"{file} is truncated or is not a GGUF file ({error})"[:500], CONVERT_FILE
        ) from error
    header = Header(file, values, {tensor.name: tensor for tensor in reader.tensors})
    count = values.get("split.count", 0)
    if count not in (0, 1):
        fix = "Put them together with `llama-gguf-split --merge`"
        raise header.wrong(f"it is one of the {count} parts of a model", fix)
    return header

"""What a GGUF file says of itself: its metadata and where its tensors lie, checked.

Our own reader: that of the `gguf` package takes lengths and counts as they are.
"""

import math
import os
import struct
from dataclasses import dataclass
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any

from dflash_trt.checkpoints.files import POINTER, check_content
from dflash_trt.errors import CheckpointError
from dflash_trt.files import open_regular

MAGIC, VERSIONS = b"GGUF", (2, 3)
NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}  # types of values
STRING, LIST = 8, 9
ALIGNMENTS = [1 << n for n in range(3, 13)]
MAX_HEADER = 256 << 20  # bytes; vocabularies of 256,000 tokens with their merges take 12 MB
MAX_STRING = 1 << 20  # bytes; chat templates have up to 20,000
MAX_LIST, MAX_ENTRIES = 1 << 22, 1 << 16  # values in a list; keys, and tensors
AGAIN = "Download or convert the file again"


@dataclass(frozen=True)
class Info:
    """A tensor as the header has it."""

    name: str
    shape: tuple[int, ...]  # [out, in]; the file has it the other way round
    kind: int  # GGMLQuantizationType
    offset: int  # bytes from the start of the file
    room: int  # bytes to the next tensor, or to the end of the file


@dataclass(frozen=True)
class Header:
    file: Path
    values: dict[str, Any]
    tensors: dict[str, Info]


def read_header(file: Path) -> Header:
    """CheckpointError when the file cannot be read, or its header is not sound."""
    try:
        with BufferedReader(open_regular(file), 1 << 20) as stream:
            check_content(file, stream.peek(len(POINTER)))
            return _header(file, _Reader(stream))
    except OSError as error:
        raise CheckpointError(
            f"cannot read {file}: {error.strerror or error}", "Give the path of a GGUF file"
        ) from error
    except ValueError as error:
        raise CheckpointError(
            f"{file} is truncated or is not a GGUF file ({error})"[:500], AGAIN
        ) from error


class _Reader:
    """Takes values off a stream, and none that the file is too short for."""

    def __init__(self, stream: "BufferedReader[FileIO]") -> None:
        self.size, self.at, self._stream = os.fstat(stream.fileno()).st_size, 0, stream

    def take(self, size: int) -> bytes:
        self.at += size
        if self.at > min(self.size, MAX_HEADER):
            raise ValueError("its header goes on behind its end")
        return self._stream.read(size)

    def number(self, kind: int) -> Any:
        code = "<" + NUMBERS[kind]
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def count(self, most: int) -> int:
        found: int = self.number(10)
        if found > most:
            raise ValueError(f"it counts {found} where {most} are the most")
        return found

    def text(self) -> str:
        return self.take(self.count(MAX_STRING)).decode("utf-8")

    def value(self) -> Any:
        kind: int = self.number(4)
        if kind == STRING:
            return self.text()
        if kind in NUMBERS:
            return self.number(kind)
        if kind != LIST:
            raise ValueError(f"a value is of type {kind}")
        kind, count = self.number(4), self.count(MAX_LIST)
        if kind == STRING:
            return [self.text() for _ in range(count)]
        if kind not in NUMBERS:
            raise ValueError(f"a list is of type {kind}")
        code = f"<{count}{NUMBERS[kind]}"
        return list(struct.unpack(code, self.take(struct.calcsize(code))))


def _header(file: Path, reader: _Reader) -> Header:
    if reader.take(4) != MAGIC:
        raise ValueError("it does not begin with GGUF")
    version: int = reader.number(4)
    if version not in VERSIONS:
        raise ValueError(f"its version is {version}, or its bytes are in another order")
    count, keys = reader.count(MAX_ENTRIES), reader.count(MAX_ENTRIES)
    values: dict[str, Any] = {}
    for _ in range(keys):
        name = reader.text()
        if name in values:
            raise ValueError(f"{name!r} stands there twice")
        values[name] = reader.value()
    parts, alignment = values.get("split.count", 0), values.get("general.alignment", 32)
    if parts not in (0, 1):
        raise CheckpointError(
            f"{file} is one of the {parts} parts of a model"[:300],
            "Put them together with `llama-gguf-split --merge`",
        )
    if alignment not in ALIGNMENTS:
        raise ValueError(f"general.alignment is {alignment!r}")
    described = [_tensor(reader) for _ in range(count)]
    data = reader.at + -reader.at % alignment
    starts = [data + offset for *_, offset in described]
    tensors: dict[str, Info] = {}
    ends = zip(starts, [*starts[1:], reader.size], strict=False)
    for (name, shape, kind, _), (start, end) in zip(described, ends, strict=True):
        if name in tensors or start % alignment or not data <= start < end <= reader.size:
            raise ValueError(f"tensor {name!r} stands there twice, or behind the next one")
        tensors[name] = Info(name, shape, kind, start, end - start)
    return Header(file, values, tensors)


def _tensor(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape, type, and where it begins in the data."""
    name, dimensions = reader.text(), reader.number(4)
    if not 1 <= dimensions <= 4:
        raise ValueError(f"tensor {name!r} has {dimensions} dimensions")
    shape = tuple(reader.number(10) for _ in range(dimensions))[::-1]
    if not 0 < math.prod(shape) < 1 << 48:
        raise ValueError(f"tensor {name!r} has the shape {list(shape)}")
    return name, shape, reader.number(4), reader.number(10)

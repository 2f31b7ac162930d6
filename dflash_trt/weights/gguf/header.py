"""The header of a GGUF file: metadata and where its tensors are."""

import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dflash_trt.errors import CheckpointError

CONVERT_FILE = "Download or convert the file again"
INSTEAD = "Use another model, or its safetensors"
MERGE = "Put the parts into one folder, or together with `llama-gguf-split --merge`"
PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")  # a file's name, as llama.cpp splits a model
MAX_PARTS = 1024
MAX_LINKS = 40
MAX_READS = 1 << 22  # of a header, one per value: 262,144 tokens and their merges are 1.3 million


class Header(NamedTuple):
    file: Path  # the first part of a model in several files
    values: dict[str, Any]
    tensors: dict[str, Any]  # of `gguf.ReaderTensor`
    places: Mapping[str, Path] = {}  # files by tensor, of a model in several

    def wrong(self, what: str, fix: str = CONVERT_FILE) -> CheckpointError:
        return CheckpointError(f"{self.file}: {what}"[:400], fix)

    def place(self, tensor: str) -> Path:
        return self.places.get(tensor, self.file)

    @property
    def architecture(self) -> str:
        return str(self.values.get("general.architecture"))

    @property
    def stated(self) -> dict[str, Any]:
        """The architecture's metadata, without its name before them."""
        prefix = f"{self.architecture}."
        return {
            key.removeprefix(prefix): value
            for key, value in self.values.items()
            if key.startswith(prefix)
        }

    @property
    def parts(self) -> list[Path]:
        """The files, in order."""
        return list(dict.fromkeys([self.file, *self.places.values()]))

    def count(self, key: str, default: int = 0) -> int:
        """Return an integer of the architecture's metadata."""
        value = self.values.get(f"{self.architecture}.{key}", default)
        if type(value) is not int or not 0 <= value <= 1 << 24:
            raise self.wrong(f"{self.architecture}.{key} is {value!r}, not a count")
        return value


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
    """Read the header of a file, or of all parts of a model; CheckpointError if one is invalid."""
    library()  # an extra may be missing
    file = _behind_links(file)
    name = PART.fullmatch(file.name)
    files = [file]
    if name is not None and 1 < int(name[3]) <= MAX_PARTS:
        numbers = range(1, int(name[3]) + 1)
        files = [file.with_name(f"{name[1]}-{i:05}-of-{name[3]}.gguf") for i in numbers]
    for part in files:
        if file.is_file() and not part.is_file():
            raise CheckpointError(f"{file} is a part of a model, and {part.name} is missing", MERGE)
    changed = [part.stat().st_mtime_ns if part.is_file() else 0 for part in files]
    return _read_parts(tuple(files), tuple(changed))


def paths_of(file: Path) -> list[Path]:
    """Return a file's path and the paths that its links lead to, in order."""
    paths = [file.absolute()]
    while paths[-1].is_symlink() and len(paths) <= MAX_LINKS:
        paths.append(paths[-1].parent / paths[-1].readlink())
    return paths


def _behind_links(file: Path) -> Path:
    """Follow links up to a part's name, which what it links to may lack, as in the Hub's cache."""
    paths = paths_of(file)
    return next((path for path in paths if PART.fullmatch(path.name)), paths[-1])


@lru_cache(maxsize=2)  # a target's and a drafter's; needed for the config and the weights
def _read_parts(files: tuple[Path, ...], _changed: tuple[int, ...]) -> Header:
    headers = [_read(file) for file in files]
    whole = headers[0]
    for i, header in enumerate(headers):
        count = header.values.get("split.count", 0)
        if count in (0, 1) and len(files) == 1:
            return header
        if len(files) == 1:
            what = f"it is one of the {count} parts of a model, but its name is not that of a part"
            raise header.wrong(what, MERGE)
        if (count, header.values.get("split.no")) != (len(files), i):
            number = header.values.get("split.no")
            what = f"its name is that of part {i + 1} of {len(files)}, but it says that it is "
            raise header.wrong(f"{what}number {number!r} (from 0) of {count!r}", MERGE)
    tensors: dict[str, Any] = {}
    places: dict[str, Path] = {}
    for header in headers:
        for name, tensor in header.tensors.items():
            if name in tensors:
                raise header.wrong(f"tensor {name} is in {places[name].name} too", MERGE)
            tensors[name] = tensor
            places[name] = header.file
        stated = header.values.get("split.tensors.count", whole.values.get("split.tensors.count"))
        if stated != whole.values.get("split.tensors.count"):
            raise header.wrong(f"it is a part of another model than {whole.file.name}", MERGE)
    stated = whole.values.get("split.tensors.count", len(tensors))
    if stated != len(tensors):
        raise whole.wrong(f"its parts have {len(tensors)} tensors, not {stated!r}", MERGE)
    return Header(whole.file, whole.values, tensors, places)


def _read(file: Path) -> Header:
    gguf = library()
    base = gguf.GGUFReader

    class Reader(base):  # type: ignore[misc, valid-type]
        """Reader that stops at the file's end and reads lists at once, unlike the package's own."""

        reads = 0

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            self._spend(1)
            return np.frombuffer(self.data, dtype, int(count), offset)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type != gguf.GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            kind = gguf.GGUFValueType(self._get(orig_offs, np.uint32)[0])
            if kind == gguf.GGUFValueType.ARRAY:
                raise ValueError("it has lists of lists")
            count = int(self._get(orig_offs + 4, np.uint64)[0])
            self._spend(count)
            start = orig_offs + 12
            if kind == gguf.GGUFValueType.STRING:
                parts: list[Any]
                parts, end = _read_strings(memoryview(self.data), start, count)
            else:
                parts = [np.frombuffer(self.data, self.gguf_scalar_to_np[kind], count, start)]
                end = start + parts[0].nbytes
            types = [gguf.GGUFValueType.ARRAY, kind]
            return end - orig_offs, parts, [*range(len(parts))], types

        def _spend(self, count: int) -> None:
            self.reads += count
            if self.reads > MAX_READS:
                raise ValueError(f"its header has more than {MAX_READS} values")

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
    return Header(file, values, {tensor.name: tensor for tensor in reader.tensors})


def _read_strings(data: memoryview, start: int, count: int) -> tuple[list[memoryview], int]:
    """Return the bytes of a list's strings, and where the list ends."""
    strings = []
    for _ in range(count):
        first = start + 8
        end = first + int.from_bytes(data[start:first], "little")
        if end > len(data):
            raise ValueError("it ends within a list of texts")
        strings.append(data[first:end])
        start = end
    return strings, start

"""The tensors of a safetensors checkpoint, read one at a time."""

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from dflash_trt.checkpoints.dequantize import MODELOPT_FILE, Quantized, dequantized
from dflash_trt.checkpoints.directory import read_json
from dflash_trt.checkpoints.gguf import BITS, LINK, PLAIN, Blocks, Packed, open_tensors
from dflash_trt.checkpoints.stored import AGAIN, DTYPES, Stored, read_header
from dflash_trt.errors import CheckpointError


class Shard(NamedTuple):
    """Entries `start .. stop-1` of an axis."""

    axis: int
    start: int
    stop: int


@dataclass(frozen=True)
class TensorSlice:
    """A range of a tensor that is not contiguous in its file."""

    whole: Stored | Quantized | Packed
    shard: Shard

    @property
    def shape(self) -> tuple[int, ...]:
        axis, start, stop = self.shard
        return (*self.whole.shape[:axis], stop - start, *self.whole.shape[axis + 1 :])

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def dtype(self) -> str:
        return self.whole.dtype

    def read(self, start: int = 0, count: int | None = None) -> np.ndarray[Any, Any]:
        """Return `count` elements from `start` on, flat; all by default. Whole first-axis entries.

        Also reads the surroundings: rows of a plain tensor, the matrix of a quantized one.
        """
        entry, whole = math.prod(self.shape[1:]), self.whole
        axis, low, high = self.shard
        first, last = start // entry, (self.size if count is None else start + count) // entry
        if axis == 0:
            first, last = first + low, last + low
        if isinstance(whole, Quantized) and len(whole.shape) == 2:
            entries = whole.read().reshape(whole.shape)[first:last]
        else:
            size = math.prod(whole.shape[1:])
            entries = whole.read(first * size, (last - first) * size)
            entries = entries.reshape(-1, *whole.shape[1:])
        inside = (slice(None),) * axis + (slice(low, high),) if axis else ()
        return entries[inside].reshape(-1)


def take_shard(tensor: Stored | Quantized | Packed, shard: Shard) -> Stored | TensorSlice:
    """Return a range of a tensor as a tensor, without reading it."""
    if not isinstance(tensor, Stored) or shard.axis:
        return TensorSlice(tensor, shard)
    row = math.prod(tensor.shape[1:]) * DTYPES[tensor.dtype].itemsize
    shape = (shard.stop - shard.start, *tensor.shape[1:])
    return replace(tensor, offset=tensor.offset + shard.start * row, shape=shape)


MAPS = {"d2t": "I64", "t2d": "BOOL"}  # a drafter's vocabulary maps, which are no weights
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def open_files(directory: Path) -> tuple[list[Path], dict[str, Stored]]:
    """Return a checkpoint's weight files with the index, and its tensors by name.

    Reads headers only. Raises CheckpointError for a missing or incomplete file.
    """
    if (directory / SINGLE).is_file():
        return [directory / SINGLE], read_header(directory / SINGLE)
    if (directory / INDEX).is_file():
        return _open_shards(directory / INDEX)
    pickles = any(directory.glob("*.bin"))
    raise CheckpointError(
        f"{directory} has no {SINGLE}" + (", only pickled weights" if pickles else ""),
        "Pickles are never loaded: save the model with save_pretrained of a current transformers"
        if pickles
        else "Give the directory that save_pretrained wrote",
    )


def stored_types(file: Path) -> Counter[str]:
    """Count the stored tensors by type, in a safetensors or GGUF file."""
    if file.name != LINK:
        return Counter(tensor.dtype for tensor in read_header(file).values())
    return Counter(
        tensor.kind if isinstance(tensor, Packed) else tensor.dtype
        for tensor in open_tensors(file).values()
    )


class Weights:
    """Tensors of `model.safetensors`, or of the shards in `model.safetensors.index.json`.

    `config` is config.json: quantized tensors appear here as plain ones, read as float32
    (`quantized.py`). So do those of `model.gguf` (`gguf.py`). Opening reads headers only. `read`
    reads one tensor without a memory map, so that a build's memory is only what it holds.
    """

    def __init__(self, directory: Path, config: Mapping[str, Any] | None = None) -> None:
        self.directory = directory
        self.files, tensors = _open(directory, config or {})
        self._tensors: dict[str, Stored | Quantized | Packed | TensorSlice] = {**tensors}
        for name, tensor in sorted(tensors.items()):
            if isinstance(tensor, Stored) and tensor.dtype not in (*PLAIN, MAPS.get(name)):
                raise CheckpointError(
                    f"tensor {name} of {tensor.file} is {tensor.dtype}; only BF16, F16 and F32 are "
                    "read, and quantized weights that config.json announces, with their scales",
                    "Use the checkpoint's unquantized version",
                )

    @property
    def names(self) -> list[str]:
        return sorted(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def dtype(self, name: str) -> str:
        """Return "BF16", "F16" or "F32"; for a vocabulary map the type in `MAPS`."""
        return self._tensor(name).dtype

    def read(self, name: str, part: int | None = None) -> np.ndarray[Any, Any]:
        """Read one tensor in its own dtype (ml_dtypes.bfloat16 for BF16), newly allocated.

        part: only this index of the first axis, which the result lacks.
        """
        tensor = self._tensor(name)
        if part is None:
            return tensor.read().reshape(tensor.shape)
        size = math.prod(tensor.shape[1:])
        return tensor.read(part * size, size).reshape(tensor.shape[1:])

    def pieces(self, name: str, rows: int) -> Iterator[np.ndarray[Any, Any]]:
        """Yield a tensor `rows` of its first axis at a time; a dequantized one whole."""
        tensor = self._tensor(name)
        if isinstance(tensor, Quantized) or isinstance(getattr(tensor, "whole", None), Quantized):
            yield self.read(name)
            return
        width = math.prod(tensor.shape[1:])
        for start in range(0, tensor.size, rows * width):
            values = tensor.read(start, min(rows * width, tensor.size - start))
            yield values.reshape(-1, *tensor.shape[1:])

    @property
    def stored_bits(self) -> Literal[4, 8] | None:
        """Bits that preserve the blocks of a GGUF file's layers; None: they are not quantized.

        4 if a weight takes at most 5 bits, scales included (Q4_0, Q4_1, Q4_K), otherwise 8.
        """
        layers = [
            tensor
            for name, tensor in self._tensors.items()
            if isinstance(tensor, Packed) and ".layers." in name and tensor.kind not in PLAIN
        ]
        if not layers:
            return None
        bits = sum(tensor.size * 8 * tensor.block[1] / tensor.block[0] for tensor in layers)
        return 4 if bits <= 5 * sum(tensor.size for tensor in layers) else 8

    def block_format(self, name: str) -> str | None:
        """Return a tensor's format in `gguf.BITS`, which `blocks` supports; else None."""
        tensor = self._tensor(name)
        return tensor.kind if isinstance(tensor, Packed) and tensor.kind in BITS else None

    def blocks(self, name: str, rows: int) -> Iterator[Blocks]:
        """Yield a matrix as stored, `rows` of its first axis at a time; see `block_format`."""
        tensor = self._tensor(name)
        assert isinstance(tensor, Packed)
        for first in range(0, tensor.shape[0], rows):
            yield tensor.blocks(first, min(first + rows, tensor.shape[0]))

    def place(self, name: str) -> tuple[Path, int] | None:
        """Return file and byte offset of a tensor stored as `read` returns it; else None."""
        tensor = self._tensor(name)
        return (tensor.file, tensor.offset) if isinstance(tensor, Stored) else None

    def shard(self, where: Callable[[str, tuple[int, ...]], Shard | None]) -> "Weights":
        """Return a view with tensors cut to the range that `where` (name, shape) returns."""
        view = copy.copy(self)
        view._tensors = dict(self._tensors)
        for name, tensor in self._tensors.items():
            assert not isinstance(tensor, TensorSlice)
            found = where(name, tensor.shape)
            if found is not None:
                view._tensors[name] = take_shard(tensor, found)
        return view

    def _tensor(self, name: str) -> Stored | Quantized | Packed | TensorSlice:
        if name not in self._tensors:
            raise CheckpointError(f"{self.directory} has no tensor {name}", AGAIN)
        return self._tensors[name]


def read_index(index: Path) -> dict[str, str]:
    """Return the file of each tensor, beside the index; CheckpointError if invalid."""
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise CheckpointError(f"{index} has no weight_map", AGAIN)
    for shard in places.values():
        # a shard may only be beside its index
        if not isinstance(shard, str) or Path(shard).name != shard or shard in ("", ".."):
            raise CheckpointError(f"{index} names a file outside its folder: {shard!r}", AGAIN)
    return places


def _open(
    directory: Path, config: Mapping[str, Any]
) -> tuple[list[Path], Mapping[str, Stored | Quantized | Packed]]:
    """Return the files, and the tensors dequantized on read."""
    if (directory / LINK).is_file():
        return [directory / LINK], open_tensors(directory / LINK)
    files, stored = open_files(directory)
    if (directory / MODELOPT_FILE).is_file():
        files.append(directory / MODELOPT_FILE)
    return files, dequantized(stored, config, directory)


def _open_shards(index: Path) -> tuple[list[Path], dict[str, Stored]]:
    places = read_index(index)
    shards = [index.with_name(shard) for shard in sorted(set(places.values()))]
    found: dict[str, Stored] = {}
    for shard in shards:
        for name, tensor in read_header(shard).items():
            # a tensor may be in two shards: the index decides
            if places.get(name, shard.name) == shard.name:
                found[name] = tensor
    for name in sorted(places.keys() - found.keys()):
        raise CheckpointError(f"{index} lists tensor {name}, but its shard lacks it", AGAIN)
    return [index, *shards], found

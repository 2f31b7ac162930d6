"""The tensors of a safetensors checkpoint, read one at a time."""

import copy
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dflash_trt.errors import CheckpointError
from dflash_trt.weights.gguf import (
    LINK,
    PLAIN,
    Blocks,
    Form,
    Packed,
    Stack,
    cut_stack,
    open_tensors,
    tensor_types,
)
from dflash_trt.weights.json_file import read_json
from dflash_trt.weights.stored import (
    DTYPES,
    EXPORT_CHECKPOINT,
    MODELOPT_FILE,
    Quantized,
    Stored,
    dequantized,
    read_header,
)

# stacks of experts, and the projections whose rows each expert has in them
STACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
MAPS = {"d2t": "I64", "t2d": "BOOL"}  # a drafter's vocabulary maps, which are no weights
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def open_files(directory: Path) -> tuple[list[Path], dict[str, Stored]]:
    """Return weight files with their index, and tensors by name; CheckpointError if incomplete."""
    if (directory / SINGLE).is_file():
        return [directory / SINGLE], read_header(directory / SINGLE)
    if (directory / INDEX).is_file():
        return _open_shards(directory / INDEX)
    problem = f"{directory} has no {SINGLE}"
    fix = "Give the directory that save_pretrained wrote"
    if any(directory.glob("*.bin")):
        problem += ", only pickled weights"
        fix = "Pickles are never loaded: save the model with save_pretrained of a current "
        fix += "transformers"
    raise CheckpointError(problem, fix)


def count_stored_types(file: Path) -> Counter[str]:
    if file.name == LINK:
        return Counter(tensor_types(file))
    if file.suffix == ".gguf":  # counted with the first part
        return Counter()
    return Counter(tensor.dtype for tensor in read_header(file).values())


class BlockSizes(NamedTuple):
    """What the tensors of one quantized type take."""

    kept: bool  # as blocks, by a build that keeps what it can; else as float32
    tensors: int
    bytes: int  # in the file
    build_bytes: int  # in such a build


class Weights:
    """Tensors of `model.safetensors`, or of the shards in `model.safetensors.index.json`.

    `config` is config.json: quantized tensors appear here as plain ones, read as float32
    (`stored.py`). So do those of `model.gguf` (`gguf.py`). Opening reads headers only. `read`
    reads one tensor without a memory map, so that a build's memory is only what it holds.
    """

    def __init__(self, directory: Path, config: Mapping[str, Any] | None = None) -> None:
        self.directory = directory
        self._tensors: dict[str, Stored | Quantized]
        if (directory / LINK).is_file():
            self.files = [directory / LINK, *sorted(directory.glob("model-*.gguf"))]
            self._tensors = {**open_tensors(directory / LINK)}
        else:
            self.files, stored = open_files(directory)
            if (directory / MODELOPT_FILE).is_file():
                self.files.append(directory / MODELOPT_FILE)
            self._tensors = {**dequantized(stored, config or {}, directory)}
        for name, tensor in sorted(self._tensors.items()):
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
        """Read a tensor, or an entry of its first axis, in its dtype (BF16: ml_dtypes.bfloat16)."""
        if part is not None:
            return self._entries(name, part, part + 1).reshape(self.shape(name)[1:])
        shape = self.shape(name)
        if not shape:
            return self._tensor(name).read().reshape(())
        return np.ascontiguousarray(self._entries(name, 0, shape[0]))

    def pieces(self, name: str, rows: int) -> Iterator[np.ndarray[Any, Any]]:
        """Yield a tensor `rows` of its first axis at a time; a dequantized one whole."""
        if isinstance(self._tensor(name), Quantized):
            yield self.read(name)
            return
        count = self.shape(name)[0]
        for start in range(0, count, rows):
            yield self._entries(name, start, min(start + rows, count))

    def _entries(self, name: str, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Return entries `start .. stop-1` of the first axis."""
        tensor = self._tensor(name)
        if isinstance(tensor, Quantized) and len(tensor.shape) == 2:
            return tensor.read().reshape(tensor.shape)[start:stop]
        size = math.prod(tensor.shape[1:])
        return tensor.read(start * size, (stop - start) * size).reshape(-1, *tensor.shape[1:])

    @property
    def has_blocks(self) -> bool:
        """Whether the layers are those of a quantized GGUF file."""
        return any(
            isinstance(tensor, Packed) and ".layers." in name and tensor.kind not in PLAIN
            for name, tensor in self._stored_tensors()
        )

    def _stored_tensors(self) -> Iterator[tuple[str, Stored | Quantized]]:
        """Yield all tensors by name, those of a stack of experts one by one."""
        for name, tensor in self._tensors.items():
            for part in tensor.parts if isinstance(tensor, Stack) else (tensor,):
                yield name, part

    def block_sizes(self) -> dict[str, BlockSizes]:
        """Return what tensors in blocks take, by their type in a GGUF file."""
        sizes: dict[str, BlockSizes] = {}
        for _, tensor in self._stored_tensors():
            if not isinstance(tensor, Packed) or tensor.kind in PLAIN:
                continue
            bits = tensor.form.bits_per_weight if tensor.form else 32
            before = sizes.get(tensor.kind, BlockSizes(tensor.form is not None, 0, 0, 0))
            sizes[tensor.kind] = BlockSizes(
                kept=before.kept,
                tensors=before.tensors + 1,
                bytes=before.bytes + tensor.stored_bytes,
                build_bytes=before.build_bytes + int(tensor.size * bits / 8),
            )
        return sizes

    def kept_bytes(self) -> int:
        """Return what all tensors take in a build that keeps blocks."""
        plain = [
            math.prod(tensor.shape) * int(DTYPES[tensor.dtype].itemsize)
            for _, tensor in self._stored_tensors()
            if not isinstance(tensor, Packed) or tensor.kind in PLAIN
        ]
        return sum(plain) + sum(size.build_bytes for size in self.block_sizes().values())

    def form(self, name: str) -> Form | None:
        """Return how `blocks` yields a tensor; None: it is not in blocks that a graph can keep."""
        tensor = self._tensor(name)
        return tensor.form if isinstance(tensor, Packed) and len(tensor.shape) == 2 else None

    def blocks(self, name: str, rows: int) -> Iterator[Blocks]:
        """Yield a matrix as stored, `rows` of its first axis at a time; see `form`."""
        tensor = self._tensor(name)
        assert isinstance(tensor, Packed)
        for first in range(0, tensor.shape[0], rows):
            yield tensor.blocks(first, min(first + rows, tensor.shape[0]))

    def fp8_block(self, name: str) -> int | None:
        """Return how many inputs share a scale of a matrix in e4m3; None: it is not, or a stack."""
        tensor = self._tensor(name)
        if not isinstance(tensor, Quantized) or tensor.codes.dtype != "F8_E4M3":
            return None
        return min(tensor.block[1], tensor.shape[1]) if len(tensor.shape) == 2 else None

    def fp8(self, name: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return a matrix as stored in e4m3, and float32 scales `[out, blocks of inputs]`.

        See `fp8_block`.
        """
        tensor = self._tensor(name)
        assert isinstance(tensor, Quantized)
        return tensor.codes_and_scales()

    def place(self, name: str) -> tuple[Path, int] | None:
        """Return file and byte offset of a tensor stored as `read` returns it; else None."""
        tensor = self._tensor(name)
        if type(tensor) is not Stored:
            return None
        return tensor.file, tensor.offset

    def unstacked(self) -> "Weights":
        """Return a view with each expert's matrices by name, where a file has them in one tensor.

        Qwen3.5's bf16 files do: `experts.gate_up_proj` `[experts, 2 * wide, hidden]`, gate first,
        and `experts.down_proj` `[experts, hidden, wide]`; its FP8 files do not.
        """
        view = copy.copy(self)
        view._tensors = {}
        for name, tensor in self._tensors.items():
            prefix, _, stack = name.rpartition(".experts.")
            if stack not in STACKED:
                view._tensors[name] = tensor
                continue
            if not isinstance(tensor, Stored) or len(tensor.shape) != 3:
                raise CheckpointError(
                    f"tensor {name} of {self.directory} holds quantized experts in one stack",
                    "Use a checkpoint with a tensor for each expert",
                )
            parts = STACKED[stack]
            for i, matrix in enumerate(cut_stack(tensor, len(parts))):
                expert, part = divmod(i, len(parts))
                view._tensors[f"{prefix}.experts.{expert}.{parts[part]}.weight"] = matrix
        return view

    def experts_in_blocks(self, name: str) -> "Weights":
        """Return a view with each expert's matrices `[out, in]` of gpt-oss' stack, by name.

        It is empty but for a stack of a GGUF file.
        """
        view = copy.copy(self)
        view._tensors = {}
        tensor = self._tensor(name)
        if isinstance(tensor, Stack):
            prefix, _, stack = name.rpartition(".")
            for part, matrices in zip(STACKED[stack], tensor.parts, strict=True):
                for i, matrix in enumerate(cut_stack(matrices, 1)):
                    view._tensors[f"{prefix}.{i}.{part}.weight"] = matrix
        return view

    def _tensor(self, name: str) -> Stored | Quantized:
        if name not in self._tensors:
            raise CheckpointError(f"{self.directory} has no tensor {name}", EXPORT_CHECKPOINT)
        return self._tensors[name]


def _open_shards(index: Path) -> tuple[list[Path], dict[str, Stored]]:
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise CheckpointError(f"{index} has no weight_map", EXPORT_CHECKPOINT)
    for shard in places.values():
        # a shard may only be beside its index
        if not isinstance(shard, str) or Path(shard).name != shard or shard in ("", ".."):
            raise CheckpointError(
                f"{index} names a file outside its folder: {shard!r}", EXPORT_CHECKPOINT
            )
    shards = [index.with_name(shard) for shard in sorted(set(places.values()))]
    tensors: dict[str, Stored] = {}
    for shard in shards:
        for name, tensor in read_header(shard).items():
            # a tensor may be in two shards: the index decides
            if places.get(name, shard.name) == shard.name:
                tensors[name] = tensor
    for name in sorted(places.keys() - tensors.keys()):
        raise CheckpointError(
            f"{index} lists tensor {name}, but its shard lacks it", EXPORT_CHECKPOINT
        )
    return [index, *shards], tensors

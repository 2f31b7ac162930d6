"""The tensors of a safetensors checkpoint, read one at a time."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from dflash_trt.checkpoints.files import read_json
from dflash_trt.errors import CheckpointError

DTYPES: dict[str, Any] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
AGAIN = "Download or export the checkpoint again"


@dataclass(frozen=True)
class _Entry:
    file: Path
    offset: int
    shape: tuple[int, ...]
    dtype: str


class Weights:
    """`model.safetensors`, or the shards that `model.safetensors.index.json` names.

    Opening reads the headers only. `read` reads one tensor from the file, not through a memory
    map, so that the memory a build takes is what it holds.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.files: list[Path] = []
        self._entries: dict[str, _Entry] = {}
        if (directory / SINGLE).is_file():
            self._open(directory / SINGLE)
        elif (directory / INDEX).is_file():
            self._open_shards(directory / INDEX)
        else:
            pickles = any(directory.glob("*.bin"))
            raise CheckpointError(
                f"{directory} has no {SINGLE}" + (", only pickled weights" if pickles else ""),
                "Pickles are never loaded: save the model with save_pretrained of a current "
                "transformers"
                if pickles
                else "Give the directory that save_pretrained wrote",
            )

    @property
    def names(self) -> list[str]:
        return sorted(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def dtype(self, name: str) -> str:
        """ "BF16", "F16" or "F32"; nothing else can be opened."""
        return self._entry(name).dtype

    def read(self, name: str, part: int | None = None) -> np.ndarray[Any, Any]:
        """One tensor in its own dtype (ml_dtypes.bfloat16 for BF16), freshly allocated.

        part: only this one of its first axis, which the result then lacks.
        """
        entry = self._entry(name)
        shape = entry.shape if part is None else entry.shape[1:]
        count = int(np.prod(shape, dtype=np.int64))
        dtype = DTYPES[entry.dtype]
        offset = entry.offset + (part or 0) * count * dtype.itemsize
        try:
            values = np.fromfile(entry.file, dtype, count, offset=offset)
        except OSError as error:
            raise CheckpointError(f"cannot read {entry.file}: {error.strerror}", AGAIN) from error
        if values.size != count:
            raise CheckpointError(f"{entry.file} ends inside tensor {name}", AGAIN)
        return values.reshape(shape)

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise CheckpointError(f"{self.directory} has no tensor {name}", AGAIN)
        return self._entries[name]

    def _open_shards(self, index: Path) -> None:
        places = read_json(index).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise CheckpointError(f"{index} has no weight_map", AGAIN)
        self.files.append(index)
        for shard in sorted(set(map(str, places.values()))):
            if Path(shard).name != shard:  # a shard lies beside its index, nowhere else
                raise CheckpointError(f"{index} names a file outside its folder: {shard}", AGAIN)
            self._open(index.parent / shard)
        _no_missing(index, places.keys() - self._entries.keys())

    def _open(self, file: Path) -> None:
        try:
            with safe_open(file, framework="numpy"):  # checks header, offsets and file length
                pass
            with file.open("rb") as stream:
                length = int.from_bytes(stream.read(8), "little")
                header = json.loads(stream.read(length))
        except (SafetensorError, ValueError) as error:
            raise CheckpointError(
                f"{file} is truncated or is not a safetensors file ({error})", AGAIN
            ) from error
        except OSError as error:
            raise CheckpointError(f"cannot read {file}: {error.strerror or error}", AGAIN) from None
        self.files.append(file)
        header.pop("__metadata__", None)
        for name, at in header.items():
            if at["dtype"] not in DTYPES:
                raise CheckpointError(
                    f"tensor {name} of {file} is {at['dtype']}; only BF16, F16 and F32 are read",
                    "Use the checkpoint's unquantised version",
                )
            start = 8 + length + at["data_offsets"][0]
            self._entries[name] = _Entry(file, start, tuple(at["shape"]), at["dtype"])


def _no_missing(index: Path, missing: Iterable[str]) -> None:
    for name in sorted(missing):
        raise CheckpointError(f"{index} lists tensor {name}, but its shard lacks it", AGAIN)

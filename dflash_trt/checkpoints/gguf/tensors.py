"""The tensors of a GGUF file under their Hugging Face names, dequantized as they are read."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_trt.checkpoints.gguf.blocks import Blocks, unpacked
from dflash_trt.checkpoints.gguf.header import AGAIN, Header, Info, read_header
from dflash_trt.checkpoints.stored import DTYPES, Stored
from dflash_trt.errors import CheckpointError

LINK = "model.gguf"  # to the file, where `convert.py` makes a directory of it
PLAIN = ("F32", "F16", "BF16")
ROPE_FREQS = "rope_freqs.weight"  # is for the config (`config.py`)
NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TURNED = (".attn_q.weight", ".attn_k.weight")  # Llama's: a head's rows are of its halves in turns


@dataclass(frozen=True)
class Packed:
    """A matrix whose rows are blocks, in a format of llama.cpp's, or lie in llama.cpp's order."""

    name: str
    file: Path
    offset: int  # bytes from the start of the file
    shape: tuple[int, ...]
    kind: str  # the format's name
    block: tuple[int, int]  # numbers in a block, and its bytes
    heads: int | None = None  # of those in `TURNED`

    @property
    def dtype(self) -> str:
        return self.kind if self.kind in PLAIN else "F32"

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def read(self, start: int = 0, count: int | None = None) -> npt.NDArray[Any]:
        """`count` numbers from `start` on, flat; all by default. Whole rows."""
        width = self.shape[-1]
        first, last = start // width, (self.size if count is None else start + count) // width
        rows = self.rows(first, last)
        plain = self.kind in PLAIN
        found = rows.view(DTYPES[self.kind]) if plain else dequantize(rows, self.kind)
        return found.reshape(-1)

    def blocks(self, first: int, last: int) -> Blocks:
        """Rows `first .. last-1` of a format in `blocks.BITS`."""
        return unpacked(self.rows(first, last), self.kind)

    def rows(self, first: int, last: int) -> npt.NDArray[np.uint8]:
        """Rows `first .. last-1` in blocks as they are stored: `[rows, bytes]`."""
        if self.heads is None:
            return self._stored(first, last)
        head = self.shape[0] // self.heads
        start, stop = first // head * head, -(-last // head) * head
        halves = self._stored(start, stop).reshape(-1, head // 2, 2, self._bytes)
        return halves.swapaxes(1, 2).reshape(-1, self._bytes)[first - start : last - start]

    @property
    def _bytes(self) -> int:
        """Of a row."""
        return self.shape[-1] // self.block[0] * self.block[1]

    def _stored(self, first: int, last: int) -> npt.NDArray[np.uint8]:
        size = math.prod(self.shape[:-1]) * self._bytes
        stored = Stored(self.name, self.file, self.offset, (size,), "U8")
        return stored.read(first * self._bytes, (last - first) * self._bytes).reshape(
            -1, self._bytes
        )


def dequantize(rows: npt.NDArray[np.uint8], kind: str) -> npt.NDArray[np.float32]:
    """Blocks of a format `[rows, bytes]` as numbers `[rows, in]`."""
    gguf = library()
    with np.errstate(all="ignore"):  # infinity where a scale is too large, as elsewhere
        found: npt.NDArray[np.float32] = gguf.quants.dequantize(
            rows, gguf.GGMLQuantizationType[kind]
        )
    return found


def open_tensors(file: Path) -> dict[str, Stored | Packed]:
    """By Hugging Face name; what is no part of the models that are read keeps its own.

    CheckpointError when one is of a type that cannot be read, or the file too short for it.
    """
    header = read_header(file)
    return {
        hf_name(info.name): _opened(header, info)
        for info in header.tensors.values()
        if info.name != ROPE_FREQS
    }


def hf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if layer and layer[2] in LAYER_NAMES:
        return f"model.layers.{layer[1]}.{LAYER_NAMES[layer[2]]}.{kind}"
    return f"{NAMES[stem]}.{kind}" if stem in NAMES else name


def _opened(header: Header, info: Info) -> Stored | Packed:
    file, (kind, block) = header.file, _format(header, info)
    if info.shape[-1] % block[0]:
        raise CheckpointError(
            f"{file}: tensor {info.name} {list(info.shape)} is not in whole blocks of {kind}", AGAIN
        )
    if math.prod(info.shape) // block[0] * block[1] > info.room:
        raise CheckpointError(f"{file} ends inside tensor {info.name}, or holds less of it", AGAIN)
    heads = _heads(header, info)
    if heads is not None and (type(heads) is not int or heads < 1 or info.shape[0] % (2 * heads)):
        raise CheckpointError(
            f"{file}: tensor {info.name} {list(info.shape)} is not of {heads!r} heads"[:300], AGAIN
        )
    if kind in PLAIN and heads is None:
        return Stored(info.name, file, info.offset, info.shape, kind)
    return Packed(info.name, file, info.offset, info.shape, kind, block, heads)


def _heads(header: Header, info: Info) -> Any:
    """How many there are of a tensor of `TURNED`, as the header says; None for others."""
    if header.values.get("general.architecture") != "llama" or not info.name.endswith(TURNED):
        return None
    heads = header.values.get("llama.attention.head_count", 0)
    shared = header.values.get("llama.attention.head_count_kv", heads)
    return heads if info.name.endswith(TURNED[0]) else shared


def _format(header: Header, info: Info) -> tuple[str, tuple[int, int]]:
    """Its name, and how many numbers of it are in how many bytes."""
    gguf, name = library(), f"number {info.kind}"
    try:
        kind = gguf.GGMLQuantizationType(info.kind)
        name, block = kind.name, gguf.GGML_QUANT_SIZES[kind]
        if name not in PLAIN:
            gguf.quants.dequantize(np.zeros((1, block[1]), np.uint8), kind)
    except (ValueError, KeyError, NotImplementedError):
        raise CheckpointError(
            f"{header.file}: tensor {info.name} is of type {name}, which cannot be read",
            "Use a file in F32, F16, BF16, Q8_0, Q4_0, Q4_1 or K quants",
        ) from None
    return name, block


def library() -> Any:
    """The `gguf` package, an extra, which knows the formats; CheckpointError without it."""
    try:
        import gguf  # noqa: PLC0415
    except ImportError as error:
        raise CheckpointError(
            f"GGUF files need the Python package gguf ({error})",
            "Run: pip install 'dflash-trt[gguf]'",
        ) from error
    return gguf

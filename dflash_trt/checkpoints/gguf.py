"""Tensors of a GGUF file (llama.cpp) by Hugging Face name, read on demand.

The `gguf` package, an extra, reads the header and knows the formats. Blocks of 32 integers with one
scale can also be read as stored, for our quantized graphs.
"""

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dflash_trt.checkpoints.directory import POINTER, check_content
from dflash_trt.checkpoints.stored import DTYPES, Stored
from dflash_trt.errors import CheckpointError

LINK = "model.gguf"  # links to the file, in the directory made by `gguf_directory.py`
AGAIN = "Download or convert the file again"
MAX_READS = 1 << 22  # of a header, one per value: vocabularies of 256,000 need 2 million
PLAIN = ("F32", "F16", "BF16")
BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}  # formats that `Packed.blocks` supports
ROPE_FREQS = "rope_freqs.weight"  # belongs in config.json
NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
TURNED = (".attn_q.weight", ".attn_k.weight")  # Llama's, whose rows interleave the halves of a head


class Header(NamedTuple):
    """A file's metadata, and its tensors as `gguf.ReaderTensor`."""

    file: Path
    values: dict[str, Any]
    tensors: dict[str, Any]

    def wrong(self, what: str, fix: str = AGAIN) -> CheckpointError:
        return CheckpointError(f"{self.file}: {what}"[:400], fix)


class Blocks(NamedTuple):
    """Rows of a matrix: (codes - zeros) * scales + offsets."""

    codes: npt.NDArray[np.int8]  # [r, in / 32, 32]
    scales: npt.NDArray[np.float32]  # [r, in / 32, 1]
    offsets: npt.NDArray[np.float32] | None = None  # shaped as scales; None: nothing to add
    zeros: npt.NDArray[np.int8] | None = None  # shaped as scales; None: zero


@dataclass(frozen=True)
class Packed:
    """A matrix whose rows are llama.cpp blocks, or permuted as in llama.cpp."""

    name: str
    file: Path
    offset: int  # bytes from the start of the file
    shape: tuple[int, ...]
    kind: str  # name of the format
    block: tuple[int, int]  # numbers per block, and bytes
    heads: int | None = None  # for tensors in `TURNED`

    @property
    def dtype(self) -> str:
        return self.kind if self.kind in PLAIN else "F32"

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def read(self, start: int = 0, count: int | None = None) -> npt.NDArray[Any]:
        """Return `count` numbers from `start` on, flat; all by default. Whole rows only."""
        width = self.shape[-1]
        first, last = start // width, (self.size if count is None else start + count) // width
        rows = self.rows(first, last)
        if self.kind in PLAIN:
            numbers: npt.NDArray[Any] = rows.view(DTYPES[self.kind])
            return numbers.reshape(-1)
        gguf = library()
        with np.errstate(all="ignore"):  # infinity if a scale overflows, as in other readers
            numbers = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[self.kind])
        return numbers.reshape(-1)

    def blocks(self, first: int, last: int) -> Blocks:
        """Return rows `first .. last-1` of a format in `BITS`."""
        return unpacked(self.rows(first, last), self.kind)

    def rows(self, first: int, last: int) -> npt.NDArray[np.uint8]:
        """Return rows `first .. last-1` as stored blocks: `[rows, bytes]`."""
        if self.heads is None:
            return self._stored(first, last)
        head = self.shape[0] // self.heads
        start, stop = first // head * head, -(-last // head) * head
        stored = self._stored(start, stop)
        halves = stored.reshape(-1, head // 2, 2, stored.shape[1]).swapaxes(1, 2)
        return halves.reshape(stored.shape)[first - start : last - start]

    def _stored(self, first: int, last: int) -> npt.NDArray[np.uint8]:
        width = self.shape[-1] // self.block[0] * self.block[1]
        size = math.prod(self.shape[:-1]) * width
        stored = Stored(self.name, self.file, self.offset, (size,), "U8")
        return stored.read(first * width, (last - first) * width).reshape(-1, width)


def unpacked(rows: npt.NDArray[np.uint8], kind: str) -> Blocks:
    """Unpack rows `[r, bytes]` of a format in `BITS`."""
    blocks = rows.reshape(len(rows), -1, {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}[kind])
    scales = blocks[..., :2].view(np.float16).astype(np.float32)
    if kind == "Q8_0":
        return Blocks(blocks[..., 2:].view(np.int8), scales)
    halves = blocks[..., -16:]
    codes = np.concatenate([halves & 15, halves >> 4], axis=-1).view(np.int8) - np.int8(8)
    if kind == "Q4_0":
        return Blocks(codes, scales)
    least = blocks[..., 2:4].view(np.float16).astype(np.float32)  # for codes from 0 to 15
    with np.errstate(all="ignore"):  # infinity if a scale is, as in other readers
        return Blocks(codes, scales, least + 8 * scales)


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
        with file.open("rb") as stream:
            check_content(file, stream.read(len(POINTER)))
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
            f"{file} is truncated or is not a GGUF file ({error})"[:500], AGAIN
        ) from error
    header = Header(file, values, {tensor.name: tensor for tensor in reader.tensors})
    if (count := values.get("split.count", 0)) not in (0, 1):
        fix = "Put them together with `llama-gguf-split --merge`"
        raise header.wrong(f"it is one of the {count} parts of a model", fix)
    return header


def open_tensors(file: Path) -> dict[str, Stored | Packed]:
    """Return the tensors by Hugging Face name; unknown tensors keep their names.

    Raises CheckpointError for an unsupported type.
    """
    header = read_header(file)
    tensors = (tensor for name, tensor in header.tensors.items() if name != ROPE_FREQS)
    return {hf_name(tensor.name): _opened(header, tensor) for tensor in tensors}


def hf_name(name: str) -> str:
    """Return a tensor's name in a Hugging Face checkpoint."""
    stem, _, kind = name.rpartition(".")
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if layer and layer[2] in LAYER_NAMES:
        return f"model.layers.{layer[1]}.{LAYER_NAMES[layer[2]]}.{kind}"
    return f"{NAMES[stem]}.{kind}" if stem in NAMES else name


def _opened(header: Header, tensor: Any) -> Stored | Packed:
    gguf, file, name = library(), header.file, tensor.name
    kind, shape = tensor.tensor_type, tuple(reversed(tensor.shape.tolist()))
    block = gguf.GGML_QUANT_SIZES[kind]
    try:
        if kind.name not in PLAIN:
            gguf.quants.dequantize(np.zeros((1, block[1]), np.uint8), kind)
    except NotImplementedError:
        fix = "Use a file in F32, F16, BF16, Q8_0, Q4_0, Q4_1 or K quants"
        what = f"tensor {name} is of type {kind.name}, which cannot be read"
        raise header.wrong(what, fix) from None
    heads = None
    if header.values.get("general.architecture") == "llama" and name.endswith(TURNED):
        heads = header.values.get("llama.attention.head_count", 0)
        if name.endswith(TURNED[1]):
            heads = header.values.get("llama.attention.head_count_kv", heads)
        if type(heads) is not int or heads < 1 or shape[0] % (2 * heads):
            raise header.wrong(f"tensor {name} {list(shape)} is not of {heads!r} heads")
    if kind.name in PLAIN and heads is None:
        return Stored(name, file, tensor.data_offset, shape, kind.name)
    return Packed(name, file, tensor.data_offset, shape, kind.name, block, heads)

"""Tensors of a GGUF file by Hugging Face name, as they were before llama.cpp's converter.

What it changes is undone when a tensor is read, except for the order of Qwen3.5's value heads: that
is a part of the spec (`DeltaNet.tiled`), so that blocks stay whole.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_trt.weights.gguf.blocks import PLAIN, Packed
from dflash_trt.weights.gguf.header import Header, library, paths_of, read_header
from dflash_trt.weights.stored import DTYPES, Stored

Floats = npt.NDArray[np.float32]

ROPE_FREQS = "rope_freqs.weight"  # belongs in config.json
MAX_LAYERS = 1024
NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate", "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}  # fmt: skip
GEMMA_NAMES = {
    "ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
LINEAR_NAMES = {
    "attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz", "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b", "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d", "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}  # fmt: skip
HYBRIDS = ("qwen3next", "qwen35", "qwen35moe")
MORE_NAMES = {  # by architecture
    **dict.fromkeys(("gemma2", "gemma3", "gemma4"), GEMMA_NAMES),
    **dict.fromkeys(HYBRIDS, LINEAR_NAMES),
    "gpt-oss": {"ffn_gate_inp": "mlp.router"},
}
WITHOUT_SUFFIX = {
    "attn_sinks.weight": "self_attn.sinks", "layer_output_scale.weight": "layer_scalar",
    "ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias",
}  # fmt: skip
EXPERTS = {  # projections that lie behind one another in each expert's part of a stack
    "ffn_gate_exps": ("gate_proj",), "ffn_up_exps": ("up_proj",), "ffn_down_exps": ("down_proj",),
    "ffn_gate_up_exps": ("gate_proj", "up_proj"),
}  # fmt: skip
FUSED = "attn_qkv"  # queries, keys and values behind one another
TURNED = ("attn_q", "attn_k")  # Llama's, whose rows interleave the halves of a head
LLAMAS = ("llama", "mistral3")
SHIFTED = ("gemma2", "gemma3", *HYBRIDS)  # norms have 1 added
GROUPED = ".ssm_in.weight"  # Qwen3-Next's projections as in its checkpoint, in older files


@dataclass(frozen=True)
class Undone(Stored):
    """A small tensor as it was before the converter changed it."""

    stored: Stored
    undo: Callable[[Floats], Floats]

    def read(self, start: int = 0, count: int | None = None) -> Floats:
        stored = self.stored.read().astype(np.float32).reshape(self.stored.shape)
        end = self.size if count is None else start + count
        numbers: Floats = self.undo(stored).reshape(-1)[start:end]
        return numbers


@dataclass(frozen=True)
class Stack(Stored):
    """gpt-oss' experts: `[experts, in, out]`, or biases `[experts, out]`.

    Stored are `[experts, out, in]`, gate and up each in a tensor: their outputs are interleaved.
    """

    parts: tuple[Stored, ...]

    def read(self, start: int = 0, count: int | None = None) -> npt.NDArray[Any]:
        """Return `count` numbers from `start` on, flat; all by default. Whole experts only."""
        size = math.prod(self.shape[1:])
        end = self.size if count is None else start + count
        experts = [self._expert(i) for i in range(start // size, end // size)]
        numbers: npt.NDArray[Any] = np.stack(experts).reshape(-1)
        return numbers

    def _expert(self, index: int) -> npt.NDArray[Any]:
        shape = self.parts[0].shape[1:]
        size = math.prod(shape)
        parts = [
            part.read(index * size, size).reshape(shape).astype(DTYPES[self.dtype])
            for part in self.parts
        ]
        expert: npt.NDArray[Any] = np.stack(parts, axis=1).reshape(-1, *shape[1:])
        return expert.T


def open_tensors(file: Path) -> dict[str, Stored]:
    """Return the tensors by Hugging Face name; CheckpointError for an unsupported type."""
    header = read_header(file)
    tensors: dict[str, Stored] = {}
    for name in header.tensors:
        if name == ROPE_FREQS or _layer_of(name) >= layer_count(header):
            continue
        held = _named(header, name)
        for again in held.keys() & tensors.keys():
            raise header.wrong(f"tensors {tensors[again].name} and {name} are both {again}")
        tensors |= held
    return _stack_experts(tensors) if header.architecture == "gpt-oss" else tensors


def tensor_types(file: Path) -> list[str]:
    return [tensor.tensor_type.name for tensor in read_header(file).tensors.values()]


def layer_count(header: Header) -> int:
    """Return how many layers there are without those that predict further tokens."""
    count = header.count("block_count") - header.count("nextn_predict_layers")
    if not 1 <= count <= MAX_LAYERS:
        raise header.wrong(f"it has {count} layers, which are not from 1 to {MAX_LAYERS}")
    return count


def left_out(file: Path) -> list[str]:
    """Name what is not read: layers that predict further tokens, and vision files beside it."""
    header = read_header(file)
    numbers = sorted({_layer_of(name) for name in header.tensors})
    beside = [
        f"layer {number}, which predicts further tokens (blk.{number}, nextn)"
        for number in numbers
        if number >= layer_count(header)
    ]
    folders = {path.parent for path in paths_of(file)}
    towers = sorted({tower.name for folder in folders for tower in folder.glob("*mmproj*.gguf")})
    return beside + [f"the vision or audio file {tower} beside it" for tower in towers]


def has_tensor(header: Header, end: str) -> bool:
    return any(name.endswith(end) for name in header.tensors)


def _layer_of(name: str) -> int:
    """Return a tensor's layer, -1 without one."""
    layer = re.match(r"blk\.(\d{1,9})\.", name)
    return int(layer[1]) if layer else -1


def _named(header: Header, name: str) -> dict[str, Stored]:
    """Return what a stored tensor holds, by Hugging Face name."""
    tensor = open_tensor(header, header.tensors[name])
    layer = re.fullmatch(r"blk\.(\d+)\.((\w+)(?:\.(weight|bias))?)", name)
    if layer is None:
        stem, _, kind = name.rpartition(".")
        hugging_face = f"{NAMES[stem]}.{kind}" if stem in NAMES else name
        return {hugging_face: _undone(header, name, tensor)}
    number, rest, stem, kind = layer.groups()
    prefix = f"model.layers.{number}"
    if rest in WITHOUT_SUFFIX:
        return {f"{prefix}.{WITHOUT_SUFFIX[rest]}": _undone(header, stem, tensor)}
    if stem == FUSED and kind and f"blk.{number}.ssm_out.weight" not in header.tensors:
        return {
            f"{prefix}.{LAYER_NAMES[part]}.{kind}": _undone(header, part, rows)
            for part, rows in _attention(header, tensor).items()
        }
    if stem in EXPERTS and len(tensor.shape) >= 2:
        return _experts(header, f"{prefix}.mlp.experts", stem, kind, tensor)
    if stem == "ssm_ba" and len(tensor.shape) == 2 and not has_tensor(header, GROUPED):
        return {
            f"{prefix}.linear_attn.in_proj_{gate}.weight": _gate(header, tensor, part)
            for part, gate in enumerate("ba")
        }
    names = LAYER_NAMES | MORE_NAMES.get(header.architecture, {})
    if stem not in names or kind is None:
        return {name: tensor}
    return {f"{prefix}.{names[stem]}.{kind}": _undone(header, stem, tensor)}


def _undone(header: Header, stem: str, tensor: Stored) -> Stored:
    """Undo what the converter of the architecture does to a tensor of this name."""
    shape = tensor.shape
    if stem == "ssm_a":
        return _changed(tensor, shape, _logarithm)
    if stem == "ssm_conv1d" and len(shape) == 2:
        return _changed(tensor, (shape[0], 1, shape[1]), _unchanged)
    if stem == "ffn_gate_inp_shexp" and len(shape) == 1:
        return replace(tensor, shape=(1, *shape))
    is_norm = stem.removesuffix(".weight").endswith("_norm") and stem != "ssm_norm"
    if is_norm and header.architecture in SHIFTED:
        return _changed(tensor, shape, _less_one)
    if stem in TURNED and header.architecture in LLAMAS:
        return _turned(header, stem, tensor)
    return tensor


def _turned(header: Header, stem: str, tensor: Stored) -> Stored:
    """Return Llama's queries or keys, the first halves of a head's rows before the second."""
    heads = _heads(header, stem, tensor)
    if tensor.shape[0] % (2 * heads):
        raise header.wrong(f"tensor {tensor.name} {list(tensor.shape)} is not of {heads} heads")
    if len(tensor.shape) == 1:
        return _changed(tensor, tensor.shape, partial(_halved, heads))
    if isinstance(tensor, Packed):
        return replace(tensor, heads=heads)
    place = (tensor.name, tensor.file, tensor.offset, tensor.shape, tensor.dtype)
    return Packed(*place, tensor.dtype, (1, DTYPES[tensor.dtype].itemsize), heads)


def _changed(tensor: Stored, shape: tuple[int, ...], undo: Callable[[Floats], Floats]) -> Undone:
    return Undone(tensor.name, tensor.file, tensor.offset, shape, "F32", tensor, undo)


def _logarithm(rates: Floats) -> Floats:
    with np.errstate(all="ignore"):
        return np.log(-rates.astype(np.float64)).astype(np.float32)


def _less_one(scale: Floats) -> Floats:
    """Undo an addition of 1: exact, so that adding it again gives the stored number."""
    return scale - np.float32(1)


def _unchanged(numbers: Floats) -> Floats:
    return numbers


def _halved(heads: int, bias: Floats) -> Floats:
    return bias.reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _gate(header: Header, tensor: Stored, part: int) -> Undone:
    """Return beta's or alpha's rows (part 0 or 1), which lie side by side by key head."""
    rows, width = tensor.shape
    heads = header.count("ssm.group_count")
    if not heads or rows % (2 * heads):
        raise header.wrong(f"tensor {tensor.name} {[rows, width]} is not of {heads} key heads")

    def select(both: Floats) -> Floats:
        return both.reshape(heads, 2, -1, width)[:, part]

    return _changed(tensor, (rows // 2, width), select)


def _attention(header: Header, fused: Stored) -> dict[str, Stored]:
    """Return a fused tensor's rows by the names of queries, keys and values."""
    heads = {stem: _heads(header, stem, fused) for stem in ("attn_q", "attn_k", "attn_v")}
    if header.architecture in HYBRIDS:  # a gate beside each query
        heads["attn_q"] *= 2
    rows, *inputs = fused.shape
    if rows % sum(heads.values()) or (isinstance(fused, Packed) and not inputs):
        what = f"tensor {fused.name} {list(fused.shape)} is not of {sum(heads.values())} heads"
        raise header.wrong(what)
    head_dim = rows // sum(heads.values())
    parts = {}
    offset = fused.offset
    for stem, count in heads.items():
        parts[stem] = replace(fused, offset=offset, shape=(count * head_dim, *inputs))
        offset += _bytes(fused, parts[stem].size)
    return parts


def _experts(header: Header, prefix: str, stem: str, kind: str, stack: Stored) -> dict[str, Stored]:
    """Return each expert's matrices, whose rows stay as stored; gpt-oss' stacks as they are."""
    parts = EXPERTS[stem]
    if header.architecture == "gpt-oss":
        return {f"{prefix}.{'_'.join(parts)}.{kind}": stack}
    if len(stack.shape) != 3 or stack.shape[1] % len(parts):
        raise header.wrong(f"tensor {stack.name} {list(stack.shape)} is no stack of experts")
    matrices = cut_stack(stack, len(parts))
    return {
        f"{prefix}.{i // len(parts)}.{parts[i % len(parts)]}.{kind}": matrix
        for i, matrix in enumerate(matrices)
    }


def cut_stack(stack: Stored, parts: int) -> list[Stored]:
    """Return the matrices of a stack `[experts, out, in]`, each expert's in equal parts."""
    count, rows, width = stack.shape
    shape = (rows // parts, width)
    size = _bytes(stack, math.prod(shape))
    return [
        replace(stack, offset=stack.offset + i * size, shape=shape) for i in range(count * parts)
    ]


def _bytes(tensor: Stored, numbers: int) -> int:
    """Return the bytes of so many numbers of a tensor, whole rows."""
    if isinstance(tensor, Packed):
        return numbers // tensor.block[0] * tensor.block[1]
    size: int = DTYPES[tensor.dtype].itemsize
    return numbers * size


def _stack_experts(tensors: dict[str, Stored]) -> dict[str, Stored]:
    """Put gpt-oss' experts together as in its checkpoint."""
    stacked = dict(tensors)
    for name in tensors:
        prefix, _, last = name.rpartition(".experts.")
        if not prefix or last not in ("gate_proj.weight", "down_proj.weight"):
            continue
        half = last.removesuffix("_proj.weight")
        both = ("gate", "up") if half == "gate" else (half,)
        for kind, end in (("weight", ""), ("bias", "_bias")):
            names = [f"{prefix}.experts.{part}_proj.{kind}" for part in both]
            parts = tuple(stacked.pop(part) for part in names if part in stacked)
            if len(parts) == len(names) and len({part.shape for part in parts}) == 1:
                stacked[f"{prefix}.experts.{'_'.join(both)}_proj{end}"] = _stack(parts)
    return stacked


def _stack(parts: tuple[Stored, ...]) -> Stack:
    first = parts[0]
    experts, outputs, *inputs = first.shape
    shape = (experts, *inputs, outputs * len(parts))
    dtypes = {part.dtype for part in parts}
    dtype = first.dtype if len(dtypes) == 1 else "F32"
    return Stack(first.name, first.file, first.offset, shape, dtype, parts)


def open_tensor(header: Header, tensor: Any) -> Stored:
    gguf = library()
    name = tensor.name
    kind = tensor.tensor_type
    shape = tuple(reversed(tensor.shape.tolist()))
    block = gguf.GGML_QUANT_SIZES[kind]
    try:
        if kind.name not in PLAIN:
            gguf.quants.dequantize(np.zeros((1, block[1]), np.uint8), kind)
    except NotImplementedError:
        fix = "Use a file in F32, F16, BF16, Q8_0, Q4_0, Q4_1 or K quants"
        what = f"tensor {name} is of type {kind.name}, which cannot be read"
        raise header.wrong(what, fix) from None
    place = (name, header.place(name), tensor.data_offset, shape)
    if kind.name in PLAIN:
        return Stored(*place, kind.name)
    return Packed(*place, "F32", kind.name, block)


def _heads(header: Header, stem: str, tensor: Stored) -> int:
    """Return the heads of queries (`attn_q`), or of keys and values, in a tensor's layer."""
    stated = header.stated
    heads = stated.get("attention.head_count")
    if stem != "attn_q":
        heads = stated.get("attention.head_count_kv", heads)
    layer = _layer_of(tensor.name)
    if isinstance(heads, list) and layer < len(heads):
        heads = heads[layer]
    if type(heads) is not int or heads < 1:
        raise header.wrong(f"tensor {tensor.name} {list(tensor.shape)} is not of {heads!r} heads")
    return heads

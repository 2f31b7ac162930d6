"""Tensors of a GGUF file by Hugging Face name, with the rows' order of Hugging Face."""

import re
from pathlib import Path
from typing import Any

import numpy as np

from dflash_trt.weights.gguf.blocks import PLAIN, Packed
from dflash_trt.weights.gguf.header import Header, library, read_header
from dflash_trt.weights.stored import Stored

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


def open_tensors(file: Path) -> dict[str, Stored]:
    """Return the tensors by Hugging Face name; CheckpointError for an unsupported type."""
    header = read_header(file)
    return {
        hugging_face_name(name): _open_tensor(header, tensor)
        for name, tensor in header.tensors.items()
        if name != ROPE_FREQS
    }


def hugging_face_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if layer and layer[2] in LAYER_NAMES:
        return f"model.layers.{layer[1]}.{LAYER_NAMES[layer[2]]}.{kind}"
    return f"{NAMES[stem]}.{kind}" if stem in NAMES else name


def _open_tensor(header: Header, tensor: Any) -> Stored:
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
    heads = None
    if header.values.get("general.architecture") == "llama" and name.endswith(TURNED):
        heads = header.values.get("llama.attention.head_count", 0)
        if name.endswith(TURNED[1]):
            heads = header.values.get("llama.attention.head_count_kv", heads)
        if type(heads) is not int or heads < 1 or shape[0] % (2 * heads):
            raise header.wrong(f"tensor {name} {list(shape)} is not of {heads!r} heads")
    place = (name, header.file, tensor.data_offset, shape)
    if kind.name in PLAIN and heads is None:
        return Stored(*place, kind.name)
    dtype = kind.name if kind.name in PLAIN else "F32"
    return Packed(*place, dtype, kind.name, block, heads)

"""A DFlash drafter in a GGUF file, as llama.cpp's converter writes it."""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, models

from dflash_trt.errors import panics_as_errors
from dflash_trt.weights.gguf.config import (
    BASE,
    CAP,
    EPSILON,
    PATTERN,
    ROTATED,
    SCALING,
    SECTIONS,
    WINDOW,
    YARN,
)
from dflash_trt.weights.gguf.config import FIELDS as DECODER_FIELDS
from dflash_trt.weights.gguf.header import Header
from dflash_trt.weights.gguf.sentencepiece import with_spaces_as_pieces
from dflash_trt.weights.gguf.tensors import LAYER_NAMES, open_tensor
from dflash_trt.weights.gguf.vocabulary import (
    BYTE,
    NORMAL,
    SPECIAL,
    STATED,
    read_vocabulary,
    role_id,
)
from dflash_trt.weights.stored import Stored

DFLASH = "dflash"
OTHERWISE = "Use the drafter's safetensors, or one without it"
DEFAULT_BLOCK = 16
# metadata by field of config.json, of the decoder and in dflash_config
FIELDS = {
    **DECODER_FIELDS, "block_count": "num_hidden_layers", "attention.key_length": "head_dim",
    "hidden_activation": "hidden_act", "attention.causal": "is_causal", EPSILON: "rms_norm_eps",
}  # fmt: skip
DFLASH_FIELDS = {
    "conv_kernel_size": "conv_kernel_size", "conv_group_size": "conv_group_size",
    "selector_rank": "selector_rank", "selector_top_k": "selector_top_k",
    "embedding_scale": "input_embedding_scale", "logit_scale": "output_multiplier",
    CAP: CAP,
    "attention.value_scale": "attention_value_scale", "sample_from_anchor": "sample_from_anchor",
}  # fmt: skip
ROPE_FIELDS = YARN | {"rope.scaling.yarn_attn_factor": "attention_factor"}
OF_HEADS = ("attention.value_length", ROTATED)  # must equal head_dim
READ = {
    *FIELDS, *DFLASH_FIELDS, *ROPE_FIELDS, *OF_HEADS, WINDOW, PATTERN, SECTIONS, BASE, SCALING,
    "block_size", "target_layers", "vocab_size",
}  # fmt: skip
NEUTRAL = {  # nothing reads these, and no other value
    "has_confidence_head": False, "rope.scaling.yarn_ext_factor": 1.0,
}  # fmt: skip
DSPARKS = "markov_w1.weight"
ROW_IDS = "d2t"
EMBEDDED = "token_embd.weight"
EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
NAMES = {
    EMBEDDED: EMBEDDING, "output.weight": HEAD, "output_norm.weight": "norm.weight",
    "enc.output_norm.weight": "hidden_norm.weight", "fc.weight": "fc.weight",
    "selector_predecessor.weight": "candidate_selector.predecessor_codebook",
    "selector_successor.weight": "candidate_selector.successor_codebook",
    "selector_hidden.weight": "candidate_selector.hidden_projection.weight",
}  # fmt: skip
LAYER_TENSORS = {
    "attn_sinks.weight": "self_attn.attention_sink_bias",
    "attn_conv_base": "attention_conv.base_kernel",
    "attn_conv_proj.weight": "attention_conv.kernel_projection.weight",
    "ffn_conv_base": "mlp_conv.base_kernel",
    "ffn_conv_proj.weight": "mlp_conv.kernel_projection.weight",
}


@dataclass(frozen=True)
class TokenIds(Stored):
    """Target ids by scored token, read as in other formats: as differences from the row."""

    def read(self, start: int = 0, count: int | None = None) -> npt.NDArray[Any]:
        ids = super().read(start, count)
        return ids - np.arange(start, start + len(ids), dtype=ids.dtype)


def is_drafter(header: Header) -> bool:
    return header.architecture == DFLASH


def drafter_config(header: Header) -> dict[str, Any]:
    """Return config.json in z-lab's layout, whose reader validates the numbers.

    CheckpointError for what is not read. `draft_vocab_size` is the rows of a head of its own.
    """
    if DSPARKS in header.tensors:
        what = f"the drafter is DSpark (tensor {DSPARKS}); dflash-trt runs DFlash drafters"
        raise header.wrong(what, "Use a DFlash drafter of the same target")
    stated = _stated(header)
    fields = {name: stated[key] for key, name in FIELDS.items() if key in stated}
    dflash = {name: stated[key] for key, name in DFLASH_FIELDS.items() if key in stated}
    dflash["target_layer_ids"] = [layer - 1 for layer in stated.get("target_layers", [])]
    dflash["block_size"] = stated.get("block_size", DEFAULT_BLOCK)
    dflash["mask_token_id"] = role_id(header, "mask")
    if not dflash.get(CAP):
        dflash.pop(CAP, None)
    dflash["attention_sink_bias"] = "blk.0.attn_sinks.weight" in header.tensors
    second = "selector_hidden.weight" in header.tensors
    if not second:
        for name in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
            dflash.pop(name, None)
    row_ids = header.tensors.get(ROW_IDS)
    if row_ids is not None and header.tensors.keys().isdisjoint(("output.weight", EMBEDDED)):
        raise header.wrong(f"{ROW_IDS} maps the rows of a head, but it has none", OTHERWISE)
    return {
        **fields,
        **_windows(header, stated),
        "architectures": ["DFlash2DraftModel" if second else "DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": _vocab_size(header, stated),
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "rope_theta": stated.get(BASE, 10000.0),
        "rope_scaling": _rope_scaling(stated),
        "head_rows": None if row_ids is None else int(row_ids.n_elements),
        "dflash_config": dflash,
    }


def _stated(header: Header) -> dict[str, Any]:
    """Return the drafter's metadata; CheckpointError for what is not read."""
    prefix = f"{DFLASH}."
    stated = header.stated
    for key in stated.keys() - READ:
        if key not in NEUTRAL or stated[key] != NEUTRAL[key]:
            what = f"{prefix}{key} is {stated[key]!r}"[:200]
            raise header.wrong(f"{what}, which dflash-trt does not handle yet", OTHERWISE)
    heads = stated.get("attention.head_count")
    width = stated.get("embedding_length")
    head_dim = stated.get("attention.key_length")
    if head_dim is None and type(heads) is int and type(width) is int and heads > 0:
        head_dim = width // heads
    for key in OF_HEADS:
        if stated.get(key, head_dim) != head_dim:
            what = f"{prefix}{key} is {stated[key]!r}, but heads have {head_dim!r}"
            raise header.wrong(what, OTHERWISE)
    if any(stated.get(SECTIONS, [])[1:]):  # a text's positions rotate by the first alone
        what = f"{prefix}{SECTIONS} is {stated[SECTIONS]!r}, for more than a text's positions"
        raise header.wrong(what, OTHERWISE)
    return stated


def _windows(header: Header, stated: dict[str, Any]) -> dict[str, Any]:
    window = stated.get(WINDOW)
    if not window:
        return {}
    if not isinstance(stated.get(PATTERN), list):
        raise header.wrong(f"{DFLASH}.{WINDOW} is {window!r}, without {PATTERN}")
    kinds = ["sliding_attention" if slides else "full_attention" for slides in stated[PATTERN]]
    return {"sliding_window": window, "use_sliding_window": True, "layer_types": kinds}


def _rope_scaling(stated: dict[str, Any]) -> dict[str, Any] | None:
    kind = stated.get(SCALING, "none")
    if kind == "none":
        return None
    named = {name: stated[key] for key, name in ROPE_FIELDS.items() if key in stated}
    return {"rope_type": kind, **named}


def _vocab_size(header: Header, stated: dict[str, Any]) -> int | None:
    """Return the rows of its embedding, or of the target's, as the file states them."""
    for name in (EMBEDDED, "selector_predecessor.weight"):
        if name in header.tensors:
            return int(header.tensors[name].shape[-1])  # the file has shapes reversed
    tokens = header.values.get(f"{STATED}.tokens", [])
    size: int | None = stated.get("vocab_size", len(tokens) or None)
    return size


def drafter_vocabulary(header: Header) -> Tokenizer | None:
    """Return a tokenizer of its tokens without merges: the target's makes texts tokens.

    Its ids are compared with the target's. None if it has none.
    """
    if header.values.get(f"{STATED}.tokens") is None:
        return None
    vocabulary = with_spaces_as_pieces(read_vocabulary(header))
    kinds = (NORMAL, BYTE, *SPECIAL)  # the converter may have changed the spelling of others
    ids = {text: i for i, text in enumerate(vocabulary.tokens) if vocabulary.types[i] in kinds}
    with panics_as_errors():
        return Tokenizer(models.BPE(vocab=ids, merges=[]))


def drafter_tensors(header: Header) -> dict[str, Stored]:
    """Return the tensors by z-lab's names; CheckpointError for an unsupported type."""
    tensors: dict[str, Stored] = {}
    for name, tensor in header.tensors.items():
        if name == ROW_IDS:
            shape = tuple(tensor.shape.tolist())
            if tensor.tensor_type.name != "I64" or len(shape) != 1:
                raise header.wrong(f"tensor {name} is no list of 64-bit token ids")
            tensors[name] = TokenIds(name, header.place(name), tensor.data_offset, shape, "I64")
            continue
        tensors[_zlab_name(name)] = open_tensor(header, tensor)
    if EMBEDDING in tensors and HEAD not in tensors:  # it then is the head, too
        tensors[HEAD] = tensors[EMBEDDING]
    return tensors


def _zlab_name(name: str) -> str:
    layer = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
    if layer is None:
        return NAMES.get(name, name)
    number, rest = layer.groups()
    stem, _, kind = rest.rpartition(".")
    if rest in LAYER_TENSORS:
        return f"layers.{number}.{LAYER_TENSORS[rest]}"
    return f"layers.{number}.{LAYER_NAMES[stem]}.{kind}" if stem in LAYER_NAMES else name

"""The config.json and generation_config.json that a GGUF file's metadata stand for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dflash_trt.errors import CheckpointError
from dflash_trt.weights.gguf.header import INSTEAD, Header
from dflash_trt.weights.gguf.tensors import GROUPED, ROPE_FREQS, has_tensor, layer_count
from dflash_trt.weights.gguf.tokenizer import STATED

Fields = dict[str, Any]  # of config.json

NOT_YET = "which dflash-trt does not handle yet"
# metadata by field of config.json
FIELDS = {
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}  # fmt: skip
BASE = "rope.freq_base"
HEAD_DIM = ("attention.key_length", "attention.value_length")
ROTATED = "rope.dimension_count"
EPSILON = "attention.layer_norm_rms_epsilon"
YARN = {
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
SCALING = "rope.scaling.type"
# what other values would mean is in no graph
FIXED = {
    "attention.causal": True,
    "attention.shared_kv_layers": 0,
    "attention.temperature_scale": 0,
    "embedding_length_per_layer_input": 0,
    "expert_gating_func": 1,  # softmax
    "expert_weights_norm": True,
}
KNOWN = {
    *FIELDS, *HEAD_DIM, *YARN, *FIXED, ROTATED, EPSILON, BASE, SCALING, "block_count", "vocab_size",
    "rope.scaling.finetuned",
}  # fmt: skip
WINDOW = "attention.sliding_window"
PATTERN = "attention.sliding_window_pattern"
CAP = "final_logit_softcapping"
WINDOWS = (WINDOW, PATTERN, f"{BASE}_swa")
EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
SHARED = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
RECURRENT = "attention.recurrent_layers"
INTERVAL = "full_attention_interval"
DELTA_NET = {
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
}
HYBRID = (*DELTA_NET, "ssm.inner_size", RECURRENT, INTERVAL, "nextn_predict_layers")
SECTIONS = "rope.dimension_sections"  # for images: equal in texts
# as in llama.cpp: the file may name only the base model's end
ENDS_OF_TURNS = {
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>",
    "<end_of_turn>", "<end_of_utterance>", "<EOT>", "[EOT]", "[EOS]", "</s>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
}  # fmt: skip
SAMPLING = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}  # fmt: skip


@dataclass(frozen=True)
class Metadata:
    header: Header
    values: dict[str, Any]  # of the architecture, without its name before them

    @property
    def layers(self) -> int:
        return layer_count(self.header)

    def refusal(self, key: str, what: str = NOT_YET) -> CheckpointError:
        name = f"{self.header.architecture}.{key}"
        return self.header.wrong(f"{name} is {self.values[key]!r}"[:200] + f", {what}", INSTEAD)

    def value(self, key: str, default: Any = None) -> Any:
        """Return one value for all layers."""
        value = self.values.get(key, default)
        if not isinstance(value, list):
            return value
        if len(set(value[: self.layers])) != 1:
            raise self.refusal(key)
        return value[0]

    def by_layer(self, key: str) -> list[Any]:
        value = self.values.get(key)
        if not isinstance(value, list):
            return [value] * self.layers
        if len(value) < self.layers:
            raise self.refusal(key, f"not a value for each of {self.layers} layers")
        return value[: self.layers]

    def named(self, keys: dict[str, str]) -> Fields:
        return {field: self.value(key) for key, field in keys.items() if key in self.values}

    def agreed(self, *keys: str) -> Any:
        """Return the value of several sizes of a head, None if none is stated."""
        stated = [key for key in keys if key in self.values]
        for key in stated[1:]:
            if self.value(key) != self.value(stated[0]):
                raise self.refusal(key, f"but heads have {self.value(stated[0])!r}")
        return self.value(stated[0]) if stated else None


class Family(NamedTuple):
    architecture: str  # of transformers
    model_type: str
    read: Callable[[Metadata], Fields]
    known: Sequence[str] = ()  # keys beside `KNOWN`


def config_json(header: Header) -> Fields:
    """Return config.json, whose numbers its reader validates; CheckpointError if unsupported."""
    kind = header.architecture
    if kind == "clip" or header.values.get("general.type") == "mmproj":
        what = "it holds a vision or audio tower (mmproj), no language model"
        raise header.wrong(what, "Give the model's own file, beside which such a file lies")
    if kind not in FAMILIES:
        what = f"of GGUF {', '.join(FAMILIES)} are read, but the architecture is {kind!r}"
        raise header.wrong(what, INSTEAD)
    stated = header.stated
    family = FAMILIES[kind]
    metadata = Metadata(header, stated)
    for key, value in stated.items():
        if key not in KNOWN and key not in family.known:
            raise metadata.refusal(key)
        if key in FIXED and value != FIXED[key]:
            raise metadata.refusal(key)
    fields = family.read(metadata)
    for key, name in FIELDS.items():
        if key in stated and name not in fields:
            fields[name] = metadata.value(key)
    *_, rows = header.tensors["token_embd.weight"].shape  # the file has shapes reversed
    return {
        "num_hidden_layers": metadata.layers,
        "rope_theta": metadata.value(BASE, 10000.0),
        "attention_bias": has_tensor(header, ".attn_output.bias"),
        **fields,
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": int(rows),
        "rms_norm_eps": stated[EPSILON],
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }


def plain(metadata: Metadata) -> Fields:
    return {
        "head_dim": metadata.agreed(*HEAD_DIM, ROTATED),
        "rope_scaling": _rope_scaling(metadata),
    }


def _rope_scaling(metadata: Metadata) -> Fields | None:
    factor = metadata.value("rope.scaling.factor")
    kind = metadata.value(SCALING, "linear")  # as in llama.cpp
    divisors = metadata.header.tensors.get(ROPE_FREQS)
    if kind in ("linear", "yarn") and factor is not None:
        if divisors is not None:
            raise metadata.refusal("rope.scaling.factor", f"and there is a tensor {ROPE_FREQS}")
        if kind == "linear":
            return {"rope_type": "linear", "factor": factor}
        return {"rope_type": "yarn", **metadata.named(YARN)}
    if kind not in ("linear", "none"):
        raise metadata.refusal(SCALING)
    if divisors is None:
        return None
    # divisors of Llama 3.1's frequencies, which LongRoPE's short factors express
    return {
        "rope_type": "longrope",
        "short_factor": divisors.data.tolist(),
        "attention_factor": 1.0,
        "original_max_position_embeddings": metadata.values["context_length"],
    }


def mistral3(metadata: Metadata) -> Fields:
    return plain(metadata) | {"sliding_window": None}


def qwen3_moe(metadata: Metadata) -> Fields:
    return plain(metadata) | _experts(metadata)


def _experts(metadata: Metadata) -> Fields:
    dense = [
        i
        for i in range(metadata.layers)
        if f"blk.{i}.ffn_gate_inp.weight" not in metadata.header.tensors
    ]
    sizes = metadata.named(EXPERTS | SHARED)
    return sizes | {"norm_topk_prob": True, "mlp_only_layers": dense}


def gpt_oss(metadata: Metadata) -> Fields:
    fields = plain(metadata) | _windows(metadata, every=2)
    if fields["rope_scaling"]:
        fields["rope_scaling"]["truncate"] = False
    return fields | {
        "attention_bias": True,
        "intermediate_size": metadata.value("expert_feed_forward_length"),
        "num_local_experts": metadata.value("expert_count"),
        "num_experts_per_tok": metadata.value("expert_used_count"),
    }


def _windows(metadata: Metadata, every: int, window: int | None = None) -> Fields:
    """Read windows; unless stated, the last of `every` layers has none."""
    window = metadata.value(WINDOW, window)
    every = metadata.values.get(PATTERN, every)
    if isinstance(every, list):
        sliding = [bool(is_sliding) for is_sliding in metadata.by_layer(PATTERN)]
    elif type(every) is int and every >= 0:
        sliding = [every == 0 or (i + 1) % every != 0 for i in range(metadata.layers)]
    else:
        raise metadata.refusal(PATTERN)
    kinds = [
        "sliding_attention" if window and is_sliding else "full_attention" for is_sliding in sliding
    ]
    return {"sliding_window": window or None, "layer_types": kinds}


def gemma2(metadata: Metadata) -> Fields:
    fields = _gemma(metadata, scaled_by_width=46)
    caps = (CAP, "attn_logit_softcapping")
    windows = _windows(metadata, every=2, window=4096)  # as in llama.cpp
    return fields | windows | {cap: metadata.value(cap) for cap in caps}


def gemma3(metadata: Metadata) -> Fields:
    fields = _gemma(metadata, scaled_by_width=62) | _windows(metadata, every=6)
    return fields | {
        CAP: metadata.value(CAP),
        "rope_local_base_freq": metadata.value(f"{BASE}_swa", 10000.0),
    }


def _gemma(metadata: Metadata, scaled_by_width: int) -> Fields:
    """Read what Gemma 2 and 3 have in common; scaled_by_width: the 27B's number of layers.

    Attention is scaled by the size of a head, and in the 27B by the model's width for each head.
    """
    fields = plain(metadata)
    scale = fields["head_dim"]
    if metadata.layers == scaled_by_width:
        scale = metadata.value("embedding_length") // metadata.value("attention.head_count")
    return fields | {"query_pre_attn_scalar": scale}


def gemma4(metadata: Metadata) -> Fields:
    windows = _windows(metadata, every=6)
    global_dim = metadata.agreed(*HEAD_DIM, ROTATED)
    local_dim = metadata.agreed(*(f"{key}_swa" for key in (*HEAD_DIM, ROTATED))) or global_dim
    heads = metadata.by_layer("attention.head_count_kv")
    widths = metadata.by_layer("feed_forward_length")
    layers = {}
    shares_keys = False
    for i, kind in enumerate(windows["layer_types"]):
        is_global = kind == "full_attention"
        layers[str(i)] = {
            "head_dim": global_dim if is_global else local_dim,
            "num_key_value_heads": heads[i],
            "intermediate_size": widths[i],
        }
        names = {f"blk.{i}.attn_{part}.weight" for part in ("v", "qkv")}
        if is_global and names.isdisjoint(metadata.header.tensors):
            shares_keys = True
    ropes = {
        "sliding_attention": {"rope_theta": metadata.value(f"{BASE}_swa", 10000.0)},
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": metadata.value(BASE, 10000.0),
            "partial_rotary_factor": _rotated_share(metadata),
        },
    }
    return windows | {
        "head_dim": local_dim,
        "global_head_dim": global_dim,
        "num_key_value_heads": heads[0],
        "intermediate_size": widths[0],
        "per_layer_config": layers,
        "attention_k_eq_v": shares_keys,
        "rope_parameters": ropes,
        "hidden_size_per_layer_input": 0,
        CAP: metadata.value(CAP),
    }


def _rotated_share(metadata: Metadata) -> float:
    """Return how much of a head is rotated: the other frequencies are divided by 1e30."""
    tensor = metadata.header.tensors.get(ROPE_FREQS)
    if tensor is None:
        return 1.0
    divisors = np.asarray(tensor.data, np.float64)
    rotated = int((divisors == 1).sum())
    if not (divisors[:rotated] == 1).all() or not (divisors[rotated:] >= 1e29).all():
        what = f"tensor {ROPE_FREQS} does not divide frequencies by 1, then by 1e30"
        raise metadata.header.wrong(what, INSTEAD)
    return rotated / len(divisors)


def qwen3_next(metadata: Metadata) -> Fields:
    fields = _hybrid(metadata) | _experts(metadata)
    if not has_tensor(metadata.header, GROUPED):
        fields["linear_projections_by_kind"] = True
    return fields


def qwen3_5(metadata: Metadata) -> Fields:
    return _tiled(_hybrid(metadata))


def qwen3_5_moe(metadata: Metadata) -> Fields:
    return _tiled(_hybrid(metadata) | _experts(metadata))


def _tiled(fields: Fields) -> Fields:
    """State the order of value heads, which llama.cpp's converter changes."""
    shared = fields["linear_num_value_heads"] != fields["linear_num_key_heads"]
    return fields | {"linear_value_heads_tiled": shared}


def _hybrid(metadata: Metadata) -> Fields:
    head_dim = metadata.agreed(*HEAD_DIM)
    heads = metadata.value("ssm.time_step_rank")
    return {
        **metadata.named(DELTA_NET),
        "linear_value_head_dim": metadata.value("ssm.inner_size") // heads,
        "layer_types": _hybrid_layer_types(metadata),
        "head_dim": head_dim,
        "partial_rotary_factor": metadata.value(ROTATED, head_dim) / head_dim,
        "rope_scaling": _rope_scaling(metadata),
    }


def _hybrid_layer_types(metadata: Metadata) -> list[str]:
    every = metadata.value(INTERVAL, 4)
    recurrent = [(i + 1) % every != 0 for i in range(metadata.layers)]
    if RECURRENT in metadata.values:
        recurrent = metadata.by_layer(RECURRENT)
    return ["linear_attention" if is_recurrent else "full_attention" for is_recurrent in recurrent]


FAMILIES = {  # by GGUF's name of the architecture
    "llama": Family("LlamaForCausalLM", "llama", plain),
    "mistral3": Family("MistralForCausalLM", "mistral", mistral3),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2", plain),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3", plain),
    "qwen3moe": Family("Qwen3MoeForCausalLM", "qwen3_moe", qwen3_moe, [*EXPERTS]),
    "gpt-oss": Family("GptOssForCausalLM", "gpt_oss", gpt_oss, [*EXPERTS, *WINDOWS]),
    "gemma2": Family(
        "Gemma2ForCausalLM", "gemma2", gemma2, [WINDOW, PATTERN, CAP, "attn_logit_softcapping"]
    ),
    "gemma3": Family("Gemma3ForCausalLM", "gemma3_text", gemma3, [*WINDOWS, CAP]),
    "gemma4": Family(
        "Gemma4ForCausalLM",
        "gemma4_text",
        gemma4,
        [*WINDOWS, CAP, *(f"{key}_swa" for key in (*HEAD_DIM, ROTATED))],
    ),
    "qwen3next": Family(
        "Qwen3NextForCausalLM", "qwen3_next", qwen3_next, [*HYBRID, *EXPERTS, *SHARED]
    ),
    "qwen35": Family("Qwen3_5ForCausalLM", "qwen3_5_text", qwen3_5, [*HYBRID, SECTIONS]),
    "qwen35moe": Family(
        "Qwen3_5MoeForCausalLM",
        "qwen3_5_moe_text",
        qwen3_5_moe,
        [*HYBRID, *EXPERTS, *SHARED, SECTIONS],
    ),
}


def generation_config(header: Header) -> dict[str, Any]:
    config = {}
    for key, name in SAMPLING.items():
        value = header.values.get(f"general.sampling.{key}")
        if value is not None:
            config[name] = value
    tokens = header.values[f"{STATED}.tokens"]
    ends = [header.values.get(f"{STATED}.{end}_token_id") for end in ("eos", "eot", "eom")]
    ends += [token for token, text in enumerate(tokens) if text in ENDS_OF_TURNS]
    config["eos_token_id"] = list(dict.fromkeys(end for end in ends if end is not None))
    return config

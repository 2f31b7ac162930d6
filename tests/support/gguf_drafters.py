"""GGUF files of drafters, written by llama.cpp's own `gguf` package from tiny ones."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file
from tokenizers import Tokenizer

NAMES = {
    "embed_tokens.weight": "token_embd.weight",
    "lm_head.weight": "output.weight",
    "norm.weight": "output_norm.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "fc.weight": "fc.weight",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "attention_conv.kernel_projection": "attn_conv_proj",
    "mlp_conv.kernel_projection": "ffn_conv_proj",
}
WITHOUT_SUFFIX = {
    "attention_conv.base_kernel": "attn_conv_base",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "self_attn.attention_sink_bias": "attn_sinks.weight",
}
NOT_STORED = ("t2d",)


def write(
    file: Path,
    drafter: Path,
    target: Path,
    kind: Kind = Kind.F32,
    *,
    more: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray[Any, Any]] | None = None,
    architecture: str = "dflash",
) -> Path:
    """Write a Hugging Face drafter as llama.cpp's converter does; kind: of matrices.

    target: has the tokenizer. more: metadata, None: without it; tensors: added ones. Speculators'
    drafters become what the converter makes of their like with a Markov head.
    """
    config = json.loads((drafter / "config.json").read_text())
    values = _metadata(config) | _tokens(target, config) | (more or {})
    writer = gguf.GGUFWriter(file, architecture)
    for key, value in values.items():
        if value is not None:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    stored = load_file(drafter / "model.safetensors")
    for name, numbers in sorted(stored.items()):
        if name in NOT_STORED:
            continue
        if name == "d2t":
            ids = numbers + np.arange(len(numbers))
            writer.add_tensor("d2t", ids, raw_dtype=Kind.I64)
        elif numbers.ndim != 2 or kind == Kind.F32:
            writer.add_tensor(stored_name(name), np.ascontiguousarray(numbers, np.float32))
        else:
            quantized = gguf.quants.quantize(numbers.astype(np.float32), kind)
            writer.add_tensor(stored_name(name), quantized, raw_dtype=kind)
    for name, numbers in (tensors or {}).items():
        writer.add_tensor(name, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def stored_name(name: str) -> str:
    if name in NAMES:
        return NAMES[name]
    _, number, rest = name.split(".", 2)
    if rest in WITHOUT_SUFFIX:
        return f"blk.{number}.{WITHOUT_SUFFIX[rest]}"
    stem, _, kind = rest.rpartition(".")
    return f"blk.{number}.{LAYER_NAMES[stem]}.{kind}"


def _metadata(config: dict[str, Any]) -> dict[str, Any]:
    config = config | config.get("transformer_layer_config", {})
    own = config | {
        name: value
        for name, value in (config.get("dflash_config") or {}).items()
        if value is not None
    }
    taps = own.get("target_layer_ids")
    if taps is None:
        taps = [tap - 1 for tap in own["aux_hidden_state_layer_ids"]]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    values = {
        "context_length": config["max_position_embeddings"],
        "block_count": config["num_hidden_layers"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        "block_size": own["block_size"],
        "target_layers": [tap + 1 for tap in taps],
        "sample_from_anchor": own.get("sample_from_anchor"),
        "logit_scale": own.get("output_multiplier"),
        "final_logit_softcapping": own.get("final_logit_softcapping"),
        "embedding_scale": own.get("input_embedding_scale"),
        "conv_kernel_size": own.get("conv_kernel_size"),
        "conv_group_size": own.get("conv_group_size"),
        "selector_rank": own.get("selector_rank"),
        "selector_top_k": own.get("selector_top_k"),
        **_attention(config, own),
        **_scaling(rope),
    }
    values = {f"dflash.{name}": value for name, value in values.items() if value is not None}
    return values | {"tokenizer.ggml.mask_token_id": own["mask_token_id"]}


def _attention(config: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    causal = config.get("is_causal")
    values: dict[str, Any] = {
        "attention.causal": own.get("causal") if causal is None else causal,
    }
    everywhere = own.get("use_swa", False)
    window = own.get("swa_window_size") or config.get("sliding_window")
    if (config.get("use_sliding_window") or everywhere) and window:
        kinds = config.get("layer_types") or []
        pattern = [kind == "sliding_attention" for kind in kinds]
        values["attention.sliding_window"] = window
        values["attention.sliding_window_pattern"] = (
            [True] * config["num_hidden_layers"] if everywhere else pattern
        )
    return values


def _scaling(rope: dict[str, Any]) -> dict[str, Any]:
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return {}
    return {
        "rope.scaling.type": kind,
        "rope.scaling.factor": rope["factor"],
        "rope.scaling.original_context_length": rope.get("original_max_position_embeddings"),
        "rope.scaling.yarn_attn_factor": rope.get("attention_factor"),
        "rope.scaling.yarn_beta_fast": rope.get("beta_fast"),
        "rope.scaling.yarn_beta_slow": rope.get("beta_slow"),
    }


def _tokens(target: Path, config: dict[str, Any]) -> dict[str, Any]:
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    size = (config.get("transformer_layer_config") or config)["vocab_size"]
    texts = [tokenizer.id_to_token(token) or f"[PAD{token}]" for token in range(size)]
    added = tokenizer.get_added_tokens_decoder()
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    values = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": [3 if token in added else 1 for token in range(size)],
        "tokenizer.ggml.eos_token_id": size - 2,
    }
    if merges:
        values["tokenizer.ggml.merges"] = [" ".join(merge) for merge in merges]
    return values

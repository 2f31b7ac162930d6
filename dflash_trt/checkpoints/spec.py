"""What the graphs need to know of a model, read from its config.json."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_trt.errors import CheckpointError

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """What target and drafter share; the names are config.json's."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    attention_bias: bool
    qk_norm: bool  # RMSNorm over head_dim on q and k, before RoPE
    max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class TargetSpec(DecoderSpec):
    model_type: str
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class DrafterSpec(DecoderSpec):
    block_size: int  # anchor + masks
    mask_token_id: int
    target_layer_ids: tuple[int, ...]  # taps: 0 is the output of the target's first layer
    num_target_layers: int


def refuse(file: Path, what: str) -> CheckpointError:
    """The error for a checkpoint that is sound but asks for something not handled."""
    return CheckpointError(
        f"{file}: {what}, which dflash-trt does not handle yet",
        "Use a plain Llama- or Qwen3-style model without it",
    )


def number(
    file: Path, config: dict[str, Any], name: str, default: int | None = None, least: int = 1
) -> int:
    """An integer field of config.json; null counts as absent."""
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        found = "is missing" if value is None else f"is {value!r}, not an integer from {least}"
        raise CheckpointError(f"{file}: {name} {found}", "Correct it or export the model again")
    return value


def real(file: Path, config: dict[str, Any], name: str, default: float) -> float:
    """A positive number in config.json; null counts as absent."""
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise CheckpointError(
            f"{file}: {name} is {value!r}, not a positive number", "Export the model again"
        )
    return float(value)


def decoder_fields(file: Path, config: dict[str, Any], *, qk_norm: bool) -> dict[str, Any]:
    """The fields of DecoderSpec; refuses what the graphs do not compute."""
    if config.get("quantization_config"):
        raise refuse(file, "the weights are quantised (quantization_config)")
    if config.get("hidden_act", "silu") != "silu":
        raise refuse(file, f"hidden_act is {config['hidden_act']!r}")
    if config.get("mlp_bias"):
        raise refuse(file, "the MLP has biases (mlp_bias)")
    sliding = ["sliding_attention"] if config.get("use_sliding_window") else []
    others = set(config.get("layer_types") or sliding) - {"full_attention"}
    if others:
        raise refuse(file, f"layers use {', '.join(sorted(others))}")
    hidden = number(file, config, "hidden_size")
    heads = number(file, config, "num_attention_heads")
    kv_heads = number(file, config, "num_key_value_heads", heads)
    head_dim = number(file, config, "head_dim", hidden // heads)
    if heads % kv_heads or head_dim % 2:
        raise CheckpointError(
            f"{file}: {heads} attention heads of {head_dim} cannot share {kv_heads} kv heads",
            "Export the checkpoint again",
        )
    return {
        "vocab_size": number(file, config, "vocab_size"),
        "hidden_size": hidden,
        "num_hidden_layers": number(file, config, "num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": number(file, config, "intermediate_size"),
        "rms_norm_eps": real(file, config, "rms_norm_eps", 1e-6),
        "rope_theta": _rope_theta(file, config),
        "attention_bias": bool(config.get("attention_bias", False)),
        "qk_norm": qk_norm,
        "max_position_embeddings": number(file, config, "max_position_embeddings"),
    }


def layer_shapes(spec: DecoderSpec, layer: str) -> Shapes:
    """Tensor shapes of one decoder layer, [out, in] as stored; layer: e.g. "model.layers.0"."""
    hidden, wide = spec.hidden_size, spec.intermediate_size
    q, kv = (n * spec.head_dim for n in (spec.num_attention_heads, spec.num_key_value_heads))
    shapes: Shapes = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, q),
        "mlp.gate_proj.weight": (wide, hidden),
        "mlp.up_proj.weight": (wide, hidden),
        "mlp.down_proj.weight": (hidden, wide),
    }
    if spec.attention_bias:
        for projection in ("q", "k", "v", "o"):
            weight = shapes[f"self_attn.{projection}_proj.weight"]
            shapes[f"self_attn.{projection}_proj.bias"] = (weight[0],)
    if spec.qk_norm:
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (spec.head_dim,)
    return {f"{layer}.{name}": shape for name, shape in shapes.items()}


def _rope_theta(file: Path, config: dict[str, Any]) -> float:
    """transformers 5 writes rope_parameters, older ones rope_theta beside rope_scaling."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise refuse(file, "RoPE differs by layer type")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise refuse(file, f"RoPE scaling of type {kind!r}")
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise refuse(file, "RoPE covers only part of a head (partial_rotary_factor)")
    return real(file, config | rope, "rope_theta", 10000.0)

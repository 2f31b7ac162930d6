"""Fields of a config.json, checked as they are read."""

from pathlib import Path
from typing import Any

from dflash_trt.checkpoints.spec import LayerSpec, Rope
from dflash_trt.errors import CheckpointError

FULL, SLIDING = "full_attention", "sliding_attention"


def refuse(file: Path, what: str) -> CheckpointError:
    """The error for a checkpoint that is sound but asks for something not handled."""
    return CheckpointError(
        f"{file}: {what}, which dflash-trt does not handle yet",
        "Use a model without it",
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


def decoder_fields(file: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The fields of DecoderSpec that every family has; a family's description adds its own."""
    if config.get("quantization_config"):
        raise refuse(file, "the weights are quantised (quantization_config)")
    if config.get("mlp_bias"):
        raise refuse(file, "the MLP has biases (mlp_bias)")
    activation = config.get("hidden_act") or "silu"
    if activation not in ("silu", "gelu_pytorch_tanh"):
        raise refuse(file, f"hidden_act is {activation!r}")
    hidden = number(file, config, "hidden_size")
    heads = number(file, config, "num_attention_heads")
    kv_heads = number(file, config, "num_key_value_heads", heads)
    head_dim = number(file, config, "head_dim", hidden // heads)
    if heads % kv_heads or head_dim % 2:
        raise CheckpointError(
            f"{file}: {heads} attention heads of {head_dim} cannot share {kv_heads} kv heads",
            "Export the checkpoint again",
        )
    layers = tuple(
        LayerSpec(
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            rope=rope(file, config, kind, head_dim),
            intermediate_size=number(file, config, "intermediate_size"),
            window=number(file, config, "sliding_window") if kind == SLIDING else None,
        )
        for kind in layer_types(file, config)
    )
    return {
        "vocab_size": number(file, config, "vocab_size"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "layers": layers,
        "rms_norm_eps": real(file, config, "rms_norm_eps", 1e-6),
        "max_position_embeddings": number(file, config, "max_position_embeddings"),
        "biases": ("q", "k", "v", "o") if config.get("attention_bias") else (),
        "hidden_act": activation,
    }


def layer_types(file: Path, config: dict[str, Any]) -> list[str]:
    """ "full_attention" or "sliding_attention" for each layer; absent: all full."""
    count = number(file, config, "num_hidden_layers")
    found = config.get("layer_types")
    kinds = [FULL] * count if found is None else found
    if not isinstance(kinds, list) or len(kinds) != count:
        raise CheckpointError(
            f"{file}: layer_types does not name a type for each of {count} layers",
            "Correct num_hidden_layers or layer_types",
        )
    for kind in kinds:
        if kind not in (FULL, SLIDING):
            raise refuse(file, f"a layer is of type {kind!r}")
    return kinds


def rope(file: Path, config: dict[str, Any], layer_type: str, head_dim: int) -> Rope:
    """transformers 5 writes rope_parameters (by layer type or one for all), older ones rope_theta
    beside rope_scaling.
    """
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if isinstance(found, dict) and isinstance(found.get(layer_type), dict):
        found = found[layer_type]
    if not isinstance(found, dict) or any(isinstance(value, dict) for value in found.values()):
        raise refuse(file, f"RoPE parameters for {layer_type} layers are {found!r}")
    values = config | found
    kind = found.get("rope_type", found.get("type", "default"))
    if kind != "default":
        raise refuse(file, f"RoPE scaling of type {kind!r}")
    if (values.get("partial_rotary_factor") or 1.0) != 1.0:
        raise refuse(file, "RoPE covers only part of a head (partial_rotary_factor)")
    return Rope(theta=real(file, values, "rope_theta", 10000.0), dim=head_dim)

"""Fields of a config.json, checked as they are read."""

import math
from pathlib import Path
from typing import Any

from dflash_trt.checkpoints.spec import Experts, LayerSpec, Rope
from dflash_trt.errors import CheckpointError

FULL, SLIDING = "full_attention", "sliding_attention"
ORIGINAL = "original_max_position_embeddings"
# the numbers that a kind of RoPE takes beside rope_theta, with their defaults (None: has none)
SCALINGS: dict[str, dict[str, float | None]] = {
    "default": {},
    "dynamic": {},
    "linear": {"factor": None},
    "llama3": {"factor": None, "low_freq_factor": None, "high_freq_factor": None, ORIGINAL: None},
    "longrope": {ORIGINAL: None},
    "proportional": {"factor": 1.0, "partial_rotary_factor": 1.0},
    "yarn": {"factor": None, "beta_fast": 32.0, "beta_slow": 1.0, ORIGINAL: None},
}


def refuse(file: Path, what: str) -> CheckpointError:
    """The error for a checkpoint that is sound but asks for something not handled."""
    return CheckpointError(
        f"{file}: {what}, which dflash-trt does not handle yet",
        "Use a model without it",
    )


def number(
    file: Path, config: dict[str, Any], name: str, default: int | None = None, least: int = 1
) -> int:
    """An integer field of config.json; null counts as absent. Counts end at 1024 (num_..)."""
    value = config.get(name)
    value = default if value is None else value
    # a tuple of 10**9 layers would take all memory before a missing tensor is seen
    most = 1024 if name.startswith("num_") else 1 << 40
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        found = f"is {value!r}, not an integer from {least} to {most}"
        found = "is missing" if value is None else found
        raise CheckpointError(f"{file}: {name} {found}", "Correct it or export the model again")
    return value


def real(file: Path, config: dict[str, Any], name: str, default: float | None = None) -> float:
    """A positive number in config.json; null counts as absent."""
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
        raise CheckpointError(
            f"{file}: {name} is {value!r}, not a positive number", "Export the model again"
        )
    return float(value)


def section(file: Path, config: dict[str, Any], name: str) -> dict[str, Any]:
    """An object in config.json; {} where it is null or absent."""
    value = config.get(name) or {}
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{file}: {name} is {value!r}, not an object", "Export the model again"
        )
    return value


def optional(file: Path, config: dict[str, Any], name: str) -> float | None:
    """A positive number, or None where the field is null or absent."""
    return None if config.get(name) is None else real(file, config, name)


def flag(
    file: Path, config: dict[str, Any], name: str, default: bool | None = False
) -> bool | None:
    """true or false in config.json; null counts as absent."""
    value = config.get(name)
    value = default if value is None else value
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"{file}: {name} is {value!r}, not true or false", "Correct it")
    return value


def decoder_fields(file: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The fields of DecoderSpec that every family has; a family's description adds its own."""
    if config.get("mlp_bias"):
        raise refuse(file, "the MLP has biases (mlp_bias)")
    activation = config.get("hidden_act") or "silu"
    if activation not in ("silu", "gelu_pytorch_tanh"):
        raise refuse(file, f"hidden_act is {activation!r}")
    hidden = number(file, config, "hidden_size")
    heads = number(file, config, "num_attention_heads")
    # by number, where a layer is not as the rest; transformers pads the numbers with zeros
    own = section(file, config, "per_layer_config")
    own = {key.lstrip("0") or "0": fields for key, fields in own.items()}
    layers = tuple(
        _layer(file, config | section(file, own, str(i)), kind)
        for i, kind in enumerate(layer_types(file, config))
    )
    longest = number(file, config, "max_position_embeddings")
    for layer in layers:  # behind it LongRoPE turns at other speeds, the cached keys included
        if layer.rope.kind == "longrope":
            longest = min(longest, int(layer.rope.parameters[ORIGINAL]))
    return {
        "vocab_size": number(file, config, "vocab_size"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "layers": layers,
        "rms_norm_eps": real(file, config, "rms_norm_eps", 1e-6),
        "max_position_embeddings": longest,
        "biases": ("q", "k", "v", "o") if config.get("attention_bias") else (),
        "hidden_act": activation,
    }


def _layer(file: Path, config: dict[str, Any], kind: str) -> LayerSpec:
    heads = number(file, config, "num_attention_heads")
    kv_heads = number(file, config, "num_key_value_heads", heads)
    head_dim = number(file, config, "head_dim", number(file, config, "hidden_size") // heads)
    if heads % kv_heads or head_dim % 2:
        raise CheckpointError(
            f"{file}: {heads} attention heads of {head_dim} cannot share {kv_heads} kv heads",
            "Export the checkpoint again",
        )
    return LayerSpec(
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rope=rope(file, config, kind, head_dim),
        intermediate_size=number(file, config, "intermediate_size"),
        window=number(file, config, "sliding_window") if kind == SLIDING else None,
    )


def layer_types(file: Path, config: dict[str, Any], every: int = 1) -> list[str]:
    """ "full_attention" or "sliding_attention" for each layer.

    Absent: each `every`-th is full, or as Qwen's older fields say.
    """
    count = number(file, config, "num_hidden_layers")
    found = config.get("layer_types")
    kinds = [SLIDING if (i + 1) % every else FULL for i in range(count)] if found is None else found
    if found is None and config.get("use_sliding_window") and config.get("sliding_window"):
        first = number(file, config, "max_window_layers", 28, least=0)
        kinds = [SLIDING if i >= first else FULL for i in range(count)]
    if not isinstance(kinds, list) or len(kinds) != count:
        raise CheckpointError(
            f"{file}: layer_types does not name a type for each of {count} layers",
            "Correct num_hidden_layers or layer_types",
        )
    for kind in kinds:
        if kind not in (FULL, SLIDING):
            raise refuse(file, f"a layer is of type {kind!r}")
    return kinds


def experts(file: Path, config: dict[str, Any], *, normalised: bool) -> Experts:
    """transformers 5 writes num_local_experts for every family, Qwen's own files num_experts."""
    name = "num_experts" if "num_experts" in config else "num_local_experts"
    count, chosen = number(file, config, name), number(file, config, "num_experts_per_tok")
    if chosen > count:
        raise CheckpointError(
            f"{file}: num_experts_per_tok is {chosen}, but there are {count} experts",
            "Export the model again",
        )
    return Experts(count=count, per_token=chosen, normalised=normalised)


def rope(file: Path, config: dict[str, Any], layer_type: str, head_dim: int) -> Rope:
    """The RoPE of one layer type, with what its kind leaves out filled in as transformers does.

    transformers 5 writes rope_parameters (by layer type or one for all), older ones rope_theta
    beside rope_scaling. Refuses kinds whose frequencies change while a text grows.
    """
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if isinstance(found, dict) and isinstance(found.get(layer_type), dict):
        found = found[layer_type]
    if not isinstance(found, dict) or any(isinstance(value, dict) for value in found.values()):
        raise refuse(file, f"RoPE parameters for {layer_type} layers are {found!r}")
    values = config | found
    kind = found.get("rope_type", found.get("type", "default"))
    if not isinstance(kind, str) or kind not in SCALINGS:
        raise refuse(file, f"RoPE scaling of type {kind!r}")
    if kind != "proportional" and (values.get("partial_rotary_factor") or 1.0) != 1.0:
        raise refuse(file, "RoPE covers only part of a head (partial_rotary_factor)")
    theta = real(file, values, "rope_theta", 10000.0)
    longest = number(file, config, "max_position_embeddings")
    # Phi-3's place for it, beside the parameters, goes first
    values[ORIGINAL] = config.get(ORIGINAL) or found.get(ORIGINAL) or longest
    if kind in ("yarn", "longrope") and values.get("factor") is None:
        values["factor"] = longest / real(file, values, ORIGINAL)
    parameters: dict[str, Any] = {
        name: real(file, values, name, default) for name, default in SCALINGS[kind].items()
    }
    low, high = (parameters.get(f"{name}_freq_factor", i) for i, name in enumerate(("low", "high")))
    if theta <= 1 or parameters.get(ORIGINAL, 2) <= 1 or not low < high:
        raise CheckpointError(f"{file}: RoPE of {found!r} has no meaning", "Export the model again")
    if kind == "yarn":
        parameters["truncate"] = bool(values.get("truncate", True))
    if kind == "longrope":
        parameters["short_factor"] = _short_factor(file, values, head_dim // 2)
    return Rope(
        theta=theta,
        dim=head_dim,
        # dynamic scales behind max_position_embeddings only, where no sequence of ours gets to
        kind="default" if kind == "dynamic" else kind,
        parameters=parameters,
        attention_factor=_attention_factor(file, kind, values),
    )


def _short_factor(file: Path, values: dict[str, Any], count: int) -> list[float]:
    found = values.get("short_factor")
    if not isinstance(found, list) or len(found) != count:
        raise CheckpointError(
            f"{file}: short_factor of longrope is not a list of {count} numbers",
            "Export the model again",
        )
    return [real(file, {"short_factor": value}, "short_factor") for value in found]


def _attention_factor(file: Path, kind: str, values: dict[str, Any]) -> float:
    """What YaRN and LongRoPE multiply cosines and sines with (transformers rope utilities)."""
    if kind not in ("yarn", "longrope"):
        return 1.0
    if values.get("attention_factor") is not None:
        return real(file, values, "attention_factor")
    factor = real(file, values, "factor")
    if factor <= 1:
        return 1.0
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(values[ORIGINAL]))
    if not (values.get("mscale") and values.get("mscale_all_dim")):
        return 0.1 * math.log(factor) + 1
    scales = (real(file, values, name) for name in ("mscale", "mscale_all_dim"))
    own, all_dim = (0.1 * scale * math.log(factor) + 1 for scale in scales)
    return own / all_dim

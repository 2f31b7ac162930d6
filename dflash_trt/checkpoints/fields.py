"""A config.json whose fields are validated when read."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_trt.checkpoints.spec import DeltaNet, Experts, LayerSpec, Rope
from dflash_trt.errors import CheckpointError

FULL_ATTENTION = "full_attention"
SLIDING = "sliding_attention"
LINEAR = "linear_attention"
ORIGINAL = "original_max_position_embeddings"
# parameters of each kind of RoPE beside rope_theta, and their defaults (None: required)
SCALINGS: dict[str, dict[str, float | None]] = {
    "default": {},
    "dynamic": {"factor": None, ORIGINAL: None},
    "linear": {"factor": None},
    "llama3": {"factor": None, "low_freq_factor": None, "high_freq_factor": None, ORIGINAL: None},
    "longrope": {ORIGINAL: None},
    "proportional": {"factor": 1.0, "partial_rotary_factor": 1.0},
    "yarn": {"factor": None, "beta_fast": 32.0, "beta_slow": 1.0, ORIGINAL: None},
}
EXPORT_MODEL = "Export the model again"


class Config(dict[str, Any]):
    """A config.json, or an object in it: null is absent; readers raise CheckpointError."""

    def __init__(self, file: Path, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.file = file  # for messages

    def with_defaults(self, values: Mapping[str, Any]) -> "Config":
        return Config(self.file, {**values, **self})

    def overridden_by(self, values: Mapping[str, Any]) -> "Config":
        return Config(self.file, {**self, **values})

    def stated(self) -> dict[str, Any]:
        return {name: value for name, value in self.items() if value is not None}

    def wrong(self, what: str, fix: str = EXPORT_MODEL) -> CheckpointError:
        return CheckpointError(f"{self.file}: {what}", fix)

    def refuse(self, what: str) -> CheckpointError:
        """Return the error for a valid checkpoint with an unsupported feature."""
        return self.wrong(f"{what}, which dflash-trt does not handle yet", "Use a model without it")

    def stated_or(self, name: str, default: Any) -> Any:
        value = self.get(name)
        return default if value is None else value

    def number(self, name: str, default: int | None = None, minimum: int = 1) -> int:
        value = self.stated_or(name, default)
        # a tuple of 10**9 layers would exhaust memory before a missing tensor is noticed
        maximum = 1024 if name.startswith("num_") else 1 << 40
        if type(value) is not int or not minimum <= value <= maximum:
            problem = f"is {value!r}, not an integer from {minimum} to {maximum}"
            if value is None:
                problem = "is missing"
            raise self.wrong(f"{name} {problem}", "Correct it or export the model again")
        return value

    def positive(self, name: str, default: float | None = None) -> float:
        value = self.stated_or(name, default)
        if type(value) not in (int, float) or not 0 < value < 1e30:
            raise self.wrong(f"{name} is {value!r}, not a positive number")
        return float(value)

    def positive_or_none(self, name: str) -> float | None:
        return None if self.get(name) is None else self.positive(name)

    def section(self, name: str) -> "Config":
        value = self.get(name) or {}
        if not isinstance(value, dict):
            raise self.wrong(f"{name} is {value!r}, not an object")
        return Config(self.file, value)

    def flag(self, name: str, default: bool | None = False) -> bool | None:
        value: bool | None = self.stated_or(name, default)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(f"{name} is {value!r}, not true or false", "Correct it")
        return value


def decoder_fields(config: Config) -> dict[str, Any]:
    if config.get("mlp_bias"):
        raise config.refuse("the MLP has biases (mlp_bias)")
    activation = config.get("hidden_act") or "silu"
    if activation not in ("silu", "gelu_pytorch_tanh"):
        raise config.refuse(f"hidden_act is {activation!r}")
    # by number, for layers that differ; transformers pads the numbers with zeros
    stated = config.section("per_layer_config")
    by_layer = Config(
        config.file, {key.lstrip("0") or "0": fields for key, fields in stated.items()}
    )
    layers = tuple(
        _layer(config.overridden_by(by_layer.section(str(i))), kind)
        for i, kind in enumerate(layer_types(config))
    )
    longest = config.number("max_position_embeddings")
    return {
        "vocab_size": config.number("vocab_size"),
        "hidden_size": config.number("hidden_size"),
        "num_attention_heads": config.number("num_attention_heads"),
        "layers": layers,
        "rms_norm_eps": config.positive("rms_norm_eps", 1e-6),
        "max_position_embeddings": min(_longest_text(layer.rope, longest) for layer in layers),
        "biases": ("q", "k", "v", "o") if config.get("attention_bias") else (),
        "hidden_act": activation,
    }


def _longest_text(rope: Rope, stated: int) -> int:
    """Return what vLLM derives (`_get_and_verify_max_len`)."""
    original = rope.parameters.get(ORIGINAL, stated)
    if rope.kind == "longrope":  # beyond it frequencies change, for cached keys too
        return min(stated, int(original))
    if rope.kind in ("yarn", "linear", "dynamic"):
        return int(original * rope.parameters["factor"])
    return stated


def _layer(config: Config, kind: str) -> LayerSpec:
    heads = config.number("num_attention_heads")
    kv_heads = config.number("num_key_value_heads", heads)
    head_dim = config.number("head_dim", config.number("hidden_size") // heads)
    if heads % kv_heads or head_dim % 2:
        raise config.wrong(
            f"{heads} attention heads of {head_dim} cannot share {kv_heads} kv heads",
            "Export the checkpoint again",
        )
    return LayerSpec(
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rope=rope(config, kind, head_dim),
        intermediate_size=config.number("intermediate_size"),
        window=config.number("sliding_window") if kind == SLIDING else None,
    )


def layer_types(config: Config, every: int = 1) -> list[str]:
    """Return types by layer; if absent, every `every`-th is full, or as Qwen's older fields say."""
    count = config.number("num_hidden_layers")
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = [SLIDING if (i + 1) % every else FULL_ATTENTION for i in range(count)]
        if config.get("use_sliding_window") and config.get("sliding_window"):
            first = config.number("max_window_layers", 28, minimum=0)
            kinds = [SLIDING if i >= first else FULL_ATTENTION for i in range(count)]
    if not isinstance(kinds, list) or len(kinds) != count:
        raise config.wrong(
            f"layer_types does not name a type for each of {count} layers",
            "Correct num_hidden_layers or layer_types",
        )
    for kind in kinds:
        if kind not in (FULL_ATTENTION, SLIDING):
            raise config.refuse(f"a layer is of type {kind!r}")
    return kinds


def hybrid_layer_types(config: Config) -> list[str]:
    """Return types by layer of a model with Gated DeltaNets; by default every fourth is full."""
    count = config.number("num_hidden_layers")
    every = config.number("full_attention_interval", 4)
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = [LINEAR if (i + 1) % every else FULL_ATTENTION for i in range(count)]
    if not isinstance(kinds, list) or len(kinds) != count:
        raise config.wrong(f"layer_types does not name a type for each of {count} layers")
    for kind in kinds:
        if kind not in (FULL_ATTENTION, LINEAR):
            raise config.refuse(f"a layer is of type {kind!r}")
    if FULL_ATTENTION not in kinds:
        raise config.refuse("no layer has attention (layer_types)")
    return kinds


def delta_net(config: Config, *, grouped: bool) -> DeltaNet:
    net = DeltaNet(
        num_key_heads=config.number("linear_num_key_heads", 16),
        num_value_heads=config.number("linear_num_value_heads", 32),
        key_dim=config.number("linear_key_head_dim", 128),
        value_dim=config.number("linear_value_head_dim", 128),
        kernel_size=config.number("linear_conv_kernel_dim", 4, minimum=2),
        grouped=grouped,
        tiled=bool(config.flag("linear_value_heads_tiled")),  # of a GGUF file
    )
    if net.num_value_heads % net.num_key_heads:
        raise config.wrong(
            f"{net.num_value_heads} value heads cannot share {net.num_key_heads} key heads"
        )
    return net


def rotary_share(config: Config, default: float) -> tuple[float, Config]:
    """Return the rotated part of each head, and the config as if whole heads were rotated."""
    name = "partial_rotary_factor"
    place = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    stated = config.section(place)
    share = config.overridden_by(stated).positive(name, default)
    if share > 1:
        raise config.wrong(f"{name} is {share}, more than a whole head")
    rest = {key: value for key, value in stated.items() if key != name}
    return share, config.overridden_by({place: rest, name: None})


def experts(config: Config, *, normalized: bool) -> Experts:
    """Read experts: transformers 5 writes num_local_experts, Qwen's own files num_experts."""
    name = "num_experts" if "num_experts" in config else "num_local_experts"
    count = config.number(name)
    chosen = config.number("num_experts_per_tok")
    if chosen > count:
        raise config.wrong(f"num_experts_per_tok is {chosen}, but there are {count} experts")
    return Experts(count=count, per_token=chosen, normalized=normalized)


def rope(config: Config, layer_type: str, head_dim: int) -> Rope:
    """Return the RoPE of one layer type, with defaults as in transformers."""
    # transformers 5 writes rope_parameters, one for all layers or by type; older ones rope_theta
    # beside rope_scaling
    stated = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if isinstance(stated, dict) and isinstance(stated.get(layer_type), dict):
        stated = stated[layer_type]
    if not isinstance(stated, dict) or any(isinstance(value, dict) for value in stated.values()):
        raise config.refuse(f"RoPE parameters for {layer_type} layers are {stated!r}")
    values = config.overridden_by(stated)
    kind = stated.get("rope_type", stated.get("type", "default"))
    if not isinstance(kind, str) or kind not in SCALINGS:
        raise config.refuse(f"RoPE scaling of type {kind!r}")
    if kind != "proportional" and (values.get("partial_rotary_factor") or 1.0) != 1.0:
        raise config.refuse("RoPE covers only part of a head (partial_rotary_factor)")
    theta = values.positive("rope_theta", 10000.0)
    longest = config.number("max_position_embeddings")
    # Phi-3's place for it, beside the parameters, takes precedence
    values[ORIGINAL] = config.get(ORIGINAL) or stated.get(ORIGINAL) or longest
    if kind == "dynamic":  # it counts from the stated length, whatever else is given
        values[ORIGINAL] = longest
    if kind in ("yarn", "longrope") and values.get("factor") is None:
        values["factor"] = longest / values.positive(ORIGINAL)
    parameters: dict[str, Any] = {
        name: values.positive(name, default) for name, default in SCALINGS[kind].items()
    }
    low = parameters.get("low_freq_factor", 0)
    high = parameters.get("high_freq_factor", 1)
    if theta <= 1 or parameters.get(ORIGINAL, 2) <= 1 or not low < high:
        raise config.wrong(f"RoPE of {stated!r} has no meaning")
    if kind == "yarn":
        parameters["truncate"] = bool(values.get("truncate", True))
    if kind == "longrope":
        parameters["short_factor"] = _short_factor(values, head_dim // 2)
    return Rope(
        theta=theta,
        dim=head_dim,
        kind=kind,
        parameters=parameters,
        attention_factor=_attention_factor(kind, values),
    )


def _short_factor(values: Config, count: int) -> list[float]:
    name = "short_factor"
    factors = values.get(name)
    if not isinstance(factors, list) or len(factors) != count:
        raise values.wrong(f"{name} of longrope is not a list of {count} numbers")
    return [Config(values.file, {name: factor}).positive(name) for factor in factors]


def _attention_factor(kind: str, values: Config) -> float:
    """Return the factor on cosines and sines for YaRN and LongRoPE (as transformers)."""
    if kind not in ("yarn", "longrope"):
        return 1.0
    if values.get("attention_factor") is not None:
        return values.positive("attention_factor")
    factor = values.positive("factor")
    if factor <= 1:
        return 1.0
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(values[ORIGINAL]))
    if not (values.get("mscale") and values.get("mscale_all_dim")):
        return 0.1 * math.log(factor) + 1
    scale = 0.1 * values.positive("mscale") * math.log(factor) + 1
    all_dim_scale = 0.1 * values.positive("mscale_all_dim") * math.log(factor) + 1
    return scale / all_dim_scale

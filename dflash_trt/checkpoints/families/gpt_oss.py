"""gpt-oss: experts in every layer, attention sinks, and a window in every other layer."""

from dataclasses import replace
from typing import Any

from dflash_trt.checkpoints.fields import Config, decoder_fields, experts, layer_types


def gpt_oss(config: Config) -> dict[str, Any]:
    own = {
        "attention_bias": config.get("attention_bias", True),
        "layer_types": layer_types(config, every=2),
    }
    fields = decoder_fields(config.under(own))
    clamped = config.real("swiglu_alpha", 1.702), config.real("swiglu_limit", 7.0)
    found = replace(experts(config, normalized=True), clamped=clamped)
    layers = tuple(replace(layer, experts=found) for layer in fields["layers"])
    return fields | {"prefix": "model.", "layers": layers, "sinks": "sinks"}

"""gpt-oss: experts in every layer, attention sinks, and a window in every other layer."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from dflash_trt.checkpoints.fields import decoder_fields, experts, layer_types, real


def gpt_oss(file: Path, config: dict[str, Any]) -> dict[str, Any]:
    own = {
        "attention_bias": config.get("attention_bias", True),
        "layer_types": layer_types(file, config, every=2),
    }
    fields = decoder_fields(file, config | own)
    clamped = real(file, config, "swiglu_alpha", 1.702), real(file, config, "swiglu_limit", 7.0)
    found = replace(experts(file, config, normalised=True), clamped=clamped)
    layers = tuple(replace(layer, experts=found) for layer in fields["layers"])
    return fields | {"prefix": "model.", "layers": layers, "sinks": "sinks"}

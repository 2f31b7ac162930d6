"""gpt-oss: experts in every layer, attention sinks, and a window in every other layer."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from dflash_trt.checkpoints.fields import FULL, SLIDING, decoder_fields, experts, number, real


def gpt_oss(file: Path, config: dict[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in config.items() if value is not None}
    count = number(file, config, "num_hidden_layers")
    kinds = [FULL if i % 2 else SLIDING for i in range(count)]
    fields = decoder_fields(file, {"attention_bias": True, "layer_types": kinds} | given)
    clamped = real(file, config, "swiglu_alpha", 1.702), real(file, config, "swiglu_limit", 7.0)
    found = replace(experts(file, config, normalised=True), clamped=clamped)
    layers = tuple(replace(layer, experts=found) for layer in fields["layers"])
    return fields | {"prefix": "model.", "layers": layers, "sinks": "sinks"}

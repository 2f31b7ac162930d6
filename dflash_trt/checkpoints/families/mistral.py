"""Mistral, dense: a window on all layers, or none."""

from typing import Any

from dflash_trt.checkpoints.fields import FULL, SLIDING, Config, decoder_fields


def mistral(config: Config) -> dict[str, Any]:
    window = config.get("sliding_window", 4096)  # left out, transformers takes 4096; null is none
    kind = FULL if window is None else SLIDING
    layer_types = [kind] * config.number("num_hidden_layers")
    return decoder_fields(config.under({"sliding_window": window, "layer_types": layer_types}))

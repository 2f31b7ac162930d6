"""Mistral: Llama with one window on all layers, or none."""

from pathlib import Path
from typing import Any

from dflash_trt.checkpoints.fields import FULL, SLIDING, decoder_fields, number


def mistral(file: Path, config: dict[str, Any]) -> dict[str, Any]:
    window = config.get("sliding_window", 4096)  # left out, transformers takes 4096; null is none
    kind = FULL if window is None else SLIDING
    layer_types = [kind] * number(file, config, "num_hidden_layers")
    own = {"sliding_window": window, "layer_types": layer_types}
    return decoder_fields(file, config | own)

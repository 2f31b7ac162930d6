"""Qwen2 and Qwen2.5, dense: Llama with biases on queries, keys and values."""

from typing import Any

from dflash_trt.checkpoints.fields import Config, decoder_fields


def qwen2(config: Config) -> dict[str, Any]:
    return decoder_fields(config) | {"biases": ("q", "k", "v")}

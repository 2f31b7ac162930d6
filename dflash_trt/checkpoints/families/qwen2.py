"""Qwen2 and Qwen2.5, dense: Llama with biases on queries, keys and values."""

from pathlib import Path
from typing import Any

from dflash_trt.checkpoints.fields import decoder_fields


def qwen2(file: Path, config: dict[str, Any]) -> dict[str, Any]:
    return decoder_fields(file, config) | {"biases": ("q", "k", "v")}

"""Qwen3, dense: Llama with a norm on queries and keys."""

from pathlib import Path
from typing import Any

from dflash_trt.checkpoints.fields import decoder_fields


def qwen3(file: Path, config: dict[str, Any]) -> dict[str, Any]:
    return decoder_fields(file, config) | {"qk_norm": True}

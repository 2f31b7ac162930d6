"""Llama 2 and 3."""

from pathlib import Path
from typing import Any

from dflash_trt.checkpoints.fields import decoder_fields


def llama(file: Path, config: dict[str, Any]) -> dict[str, Any]:
    return decoder_fields(file, config)

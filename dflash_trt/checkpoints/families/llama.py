"""Llama 2 and 3."""

from typing import Any

from dflash_trt.checkpoints.fields import Config, decoder_fields


def llama(config: Config) -> dict[str, Any]:
    return decoder_fields(config)

"""The arguments of TensorRT-LLM's `LLM(...)`, with the version that each is known from.

The classes have upstream's names, fields, types and defaults, as of
`tensorrt_llm/llmapi/llm_args.py` at commit 00043967 (between 1.3.0rc24 and rc27) and the
reference pages of `DFlashDecodingConfig` for 1.3.0rc27 and 1.4.0rc1. What was not yet in the
manifest of arguments before 1.3.0rc21 (`llm_args_golden_manifest.json` at 92e30752) is taken to be
new in 1.3.0rc27, and what is not there to be new in 1.4.0rc1: a key may be older than it says here,
never newer. Arguments that only an object of Python can be given for are left out,
and sizes are above zero, which upstream finds out later.
"""

from dflash_trt.tensorrt_llm.schema.base import (
    VERSIONS,
    Since,
    Status,
    Upstream,
    has,
    nested,
    since,
)
from dflash_trt.tensorrt_llm.schema.llm import TorchLlmArgs
from dflash_trt.tensorrt_llm.schema.speculative import DFlashDecodingConfig

__all__ = [
    "VERSIONS",
    "DFlashDecodingConfig",
    "Since",
    "Status",
    "TorchLlmArgs",
    "Upstream",
    "has",
    "nested",
    "since",
]

"""Target families: what config.json says, as fields of TargetSpec. A family is a file here.

A description takes the path of config.json (for messages) and its content, and gives the fields of
TargetSpec except those that `load_target` reads for every family.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dflash_trt.checkpoints.families.gpt_oss import gpt_oss
from dflash_trt.checkpoints.families.llama import llama
from dflash_trt.checkpoints.families.qwen3 import qwen3
from dflash_trt.checkpoints.families.qwen3_moe import qwen3_moe

FAMILIES: dict[str, Callable[[Path, dict[str, Any]], dict[str, Any]]] = {  # by architecture
    "GptOssForCausalLM": gpt_oss,
    "LlamaForCausalLM": llama,
    "Qwen3ForCausalLM": qwen3,
    "Qwen3MoeForCausalLM": qwen3_moe,
}

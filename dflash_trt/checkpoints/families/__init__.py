"""Target families: what config.json says, as fields of TargetSpec. A family is a file here.

A description takes config.json and gives the fields of TargetSpec, except those that `load_target`
reads for every family.
"""

from collections.abc import Callable
from typing import Any

from dflash_trt.checkpoints.families.gemma import gemma2, gemma3
from dflash_trt.checkpoints.families.gemma4 import gemma4
from dflash_trt.checkpoints.families.gpt_oss import gpt_oss
from dflash_trt.checkpoints.families.llama import llama
from dflash_trt.checkpoints.families.mistral import mistral
from dflash_trt.checkpoints.families.qwen2 import qwen2
from dflash_trt.checkpoints.families.qwen3 import qwen3, qwen3_moe
from dflash_trt.checkpoints.fields import Config

FAMILIES: dict[str, Callable[[Config], dict[str, Any]]] = {  # by architecture
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": gemma3,
    "Gemma3ForConditionalGeneration": gemma3,
    "Gemma4ForCausalLM": gemma4,
    "Gemma4ForConditionalGeneration": gemma4,
    "GptOssForCausalLM": gpt_oss,
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "Qwen3MoeForCausalLM": qwen3_moe,
}

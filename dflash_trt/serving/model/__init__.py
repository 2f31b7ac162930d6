"""The public model: from request tensors to response tensors."""

from dflash_trt.serving.model.control import send_command
from dflash_trt.serving.model.llm import limits

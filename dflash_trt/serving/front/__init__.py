"""The public model: from request tensors to response tensors."""

from dflash_trt.serving.front.control import send_command
from dflash_trt.serving.front.llm import limits

"""The public model: from request tensors to response tensors."""

from dflash_trt.serving.front.control import command_handler
from dflash_trt.serving.front.llm import limits

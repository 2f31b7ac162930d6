"""The public model: from request tensors to response tensors."""

from dflash_trt.serving.front.control import Control
from dflash_trt.serving.front.llm import guide, limits

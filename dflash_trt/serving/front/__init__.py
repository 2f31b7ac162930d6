"""Requests, from tensors to answers."""

from dflash_trt.serving.front.control import Control
from dflash_trt.serving.front.llm import guide, limits

"""Methods of decoding, and which engine kinds have which."""

from typing import Literal

from dflash_trt.config.engines import OnnxRuntime, TensorRT, TensorRTLLM

Method = Literal["dflash", "lilicorr", "eagle3", "draft_model", "ngram", "none"]
DRAFTERLESS: tuple[Method, ...] = ("ngram", "none")
BLOCKS: tuple[Method, ...] = ("dflash", "lilicorr")  # a DFlash drafter fills them


def methods_of(engine: OnnxRuntime | TensorRT | TensorRTLLM) -> tuple[Method, ...]:
    """What an engine kind can decode by."""
    if isinstance(engine, TensorRTLLM):
        return ("dflash", "eagle3", *DRAFTERLESS)
    if isinstance(engine, OnnxRuntime):
        return (*BLOCKS, "draft_model", *DRAFTERLESS)
    return ("dflash", "none")

"""The build config: the one schema a user writes, as YAML."""

from dflash_trt.config.build import (
    BLOCKS,
    DRAFTERLESS,
    RECOMPUTE_TAIL,
    BuildConfig,
    Method,
    Speculation,
    json_schema,
    with_ranks,
)
from dflash_trt.config.engines import Capability, OnnxRuntime, TensorRT, TensorRTLLM, Version
from dflash_trt.config.load import load_config, variants
from dflash_trt.config.source import Source, TargetSource

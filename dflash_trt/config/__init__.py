"""The build config: the one schema a user writes, as YAML."""

from dflash_trt.config.build import (
    RECOMPUTE_TAIL,
    BuildConfig,
    Speculation,
    json_schema,
    load_config,
    with_ranks,
)
from dflash_trt.config.engines import Capability, OnnxRuntime, TensorRT, TensorRTLLM, Version
from dflash_trt.config.source import Source, TargetSource

"""The build config: the one schema a user writes, as YAML."""

from dflash_trt.config.build import CHAIN, RECOMPUTE_TAIL, BuildConfig, Speculation
from dflash_trt.config.load import json_schema, load_config, variants
from dflash_trt.config.sections import (
    DRAFTERLESS,
    Capability,
    Method,
    OnnxRuntime,
    Precision,
    Source,
    TargetSource,
    TensorRT,
    TensorRTLLM,
    Version,
)

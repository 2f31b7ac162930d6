"""The build config: the one schema a user writes, as YAML."""

from dflash_trt.config.build import BuildConfig, json_schema, load_config, with_ranks
from dflash_trt.config.engines import OnnxRuntime, TensorRT, TensorRTLLM, Version
from dflash_trt.config.source import Source, TargetSource

__all__ = [
    "BuildConfig",
    "OnnxRuntime",
    "Source",
    "TargetSource",
    "TensorRT",
    "TensorRTLLM",
    "Version",
    "json_schema",
    "load_config",
    "with_ranks",
]

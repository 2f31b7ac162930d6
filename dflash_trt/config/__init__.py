"""The build config: the one schema a user writes, as YAML."""

from dflash_trt.config.build import (
    CHAIN,
    RECOMPUTE_TAIL,
    BuildConfig,
    Capability,
    GraphEngine,
    Method,
    OnnxRuntime,
    Precision,
    PyTorch,
    Source,
    Speculation,
    TensorRT,
    TensorRTLLM,
    Version,
)
from dflash_trt.config.graph_options import COPIED, Bits, GraphOptions, Storage
from dflash_trt.config.load import config_text, json_schema, load_config, variants

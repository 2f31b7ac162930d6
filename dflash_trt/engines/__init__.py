"""Engines: their description, and one module per kind that loads and steps it."""

import os

from dflash_trt.engines.info import (
    ENGINE_FILE,
    MAX_BUFFERED,
    EngineInfo,
    StateInfo,
    buffered_bytes,
    drafter_cache_len,
    few_sizes,
    logits_bytes,
    most_buffered,
    most_verified,
    padded_size,
    read_info,
    target_cache_len,
    write_info,
)
from dflash_trt.engines.step import (
    FIRST_BLOCK,
    FIRST_STATE,
    DeviceStep,
    Engine,
    Step,
    check_machine,
    load_engine,
    load_engines,
    module_of,
    read_infos,
    role_directories,
)

# ONNX Runtime reports models and machines to Microsoft unless this is set before it is imported
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

"""Bundles for TensorRT-LLM: checkpoints and checked arguments of its `LLM(...)`."""

from dflash_trt.tensorrt_llm.argument_checks import check_args, look_up
from dflash_trt.tensorrt_llm.bundle import (
    ARGS_FILE,
    KIND,
    BundleInfo,
    checkpoint_files,
    drafter_name,
    read_info,
    read_llm_args,
    with_local_target,
    write_bundle,
)
from dflash_trt.tensorrt_llm.host import SeenGpu, check_host, gpus, judged_arguments
from dflash_trt.tensorrt_llm.llm_args import (
    CONTEXT,
    Context,
    choose_args,
    deployment,
    drafter_backend,
    env_vars,
    kv_bytes,
    layout_of,
    target_values,
)
from dflash_trt.tensorrt_llm.quantization import as_if_quantized, check_quantizable, quantize_target
from dflash_trt.tensorrt_llm.schema import LlmArgs

"""Bundles for TensorRT-LLM: the arguments of its `LLM(...)`, chosen by rule and checked."""

from dflash_trt.tensorrt_llm.args import check_args, choose_args, env_vars
from dflash_trt.tensorrt_llm.arguments import LlmArgs, typed_args
from dflash_trt.tensorrt_llm.bundle import checkpoint_files, drafter_name, write_bundle
from dflash_trt.tensorrt_llm.context import PAGED, recompute_tail, target_values
from dflash_trt.tensorrt_llm.draft_len import CONTEXT, kv_bytes, layout_of
from dflash_trt.tensorrt_llm.faults import look_up
from dflash_trt.tensorrt_llm.host import SeenGpu, check_host, gpus, not_on_nvlink
from dflash_trt.tensorrt_llm.hub_cache import cached_target, with_cached_target
from dflash_trt.tensorrt_llm.info import (
    ARGS_FILE,
    KIND,
    BundleInfo,
    read_info,
    read_llm_args,
    write_info,
)
from dflash_trt.tensorrt_llm.judgement import refused_arguments
from dflash_trt.tensorrt_llm.quantization import announced, check_quantizable, quantize_target

"""`TorchLlmArgs`: the arguments of `LLM(...)` themselves."""

from typing import Annotated, Any, Literal

from pydantic import Field

from dflash_trt.tensorrt_llm.schema.base import (
    BETA,
    DEPRECATED,
    PROTOTYPE,
    RC27,
    RC140,
    NonNegative,
    Object,
    Positive,
    Upstream,
)
from dflash_trt.tensorrt_llm.schema.cache import KvCacheConfig
from dflash_trt.tensorrt_llm.schema.execution import (
    AttentionDpConfig,
    CudaGraphConfig,
    MoeConfig,
    Nvfp4GemmConfig,
    SchedulerConfig,
    TorchCompileConfig,
)
from dflash_trt.tensorrt_llm.schema.speculative import DFlashDecodingConfig


class TelemetryConfig(Upstream):
    disabled: bool = False
    usage_context: Literal["unknown", "llm_class", "cli_serve", "cli_bench", "cli_eval"] = "unknown"


class TorchLlmArgs(Upstream):
    model: str
    tokenizer: str | None = None
    tokenizer_mode: Literal["auto", "slow"] = "auto"
    custom_tokenizer: Annotated[str | None, PROTOTYPE] = None
    post_processor_hook: Annotated[str | None, PROTOTYPE, RC27] = None
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = False
    tensor_parallel_size: Positive = 1
    dtype: str = "auto"
    revision: str | None = None
    tokenizer_revision: str | None = None
    model_kwargs: Annotated[Object | None, PROTOTYPE] = None
    pipeline_parallel_size: Positive = 1
    context_parallel_size: Positive = 1
    gpus_per_node: Annotated[Positive | None, BETA] = None
    moe_cluster_parallel_size: Annotated[int | None, DEPRECATED] = None
    moe_tensor_parallel_size: int | None = None
    moe_expert_parallel_size: int | None = None
    enable_attention_dp: Annotated[bool, BETA] = False
    enable_lm_head_tp_in_adp: Annotated[bool, PROTOTYPE] = False
    pp_partition: Annotated[list[int] | None, PROTOTYPE] = None
    cp_config: Annotated[Object | None, PROTOTYPE] = None
    load_format: Annotated[str, Field(pattern="(?i)^(auto|dummy|vision_only|gms)$")] = "AUTO"
    enable_lora: bool = False
    lora_config: Object | None = None
    kv_cache_config: KvCacheConfig = KvCacheConfig()
    enable_chunked_prefill: bool = False
    guided_decoding_backend: Literal["xgrammar", "llguidance"] | None = None
    batched_logits_processor: Any = None
    iter_stats_max_iterations: Annotated[int | None, Field(ge=-1), PROTOTYPE] = None
    request_stats_max_iterations: Annotated[int | None, Field(ge=-1), PROTOTYPE] = None
    peft_cache_config: Annotated[Object | None, PROTOTYPE] = None
    scheduler_config: Annotated[SchedulerConfig, PROTOTYPE] = SchedulerConfig()
    cache_transceiver_config: Annotated[Object | None, PROTOTYPE] = None
    sparse_attention_config: Annotated[Object | None, PROTOTYPE] = None
    kv_cache_compression_config: Annotated[Object | None, PROTOTYPE, RC27] = None
    speculative_config: DFlashDecodingConfig | None = None
    max_batch_size: Positive | None = 2048
    max_input_len: int | None = 1024
    max_seq_len: Positive | None = None
    max_beam_width: int | None = 1
    max_num_tokens: Positive | None = 8192
    gather_generation_logits: Annotated[bool, PROTOTYPE] = False
    num_postprocess_workers: Annotated[int, PROTOTYPE] = 0
    postprocess_tokenizer_dir: Annotated[str | None, PROTOTYPE] = None
    num_serve_frontends: Annotated[int, Field(ge=1, le=64), PROTOTYPE, RC27] = 1
    reasoning_parser: Annotated[str | None, PROTOTYPE] = None
    otlp_traces_endpoint: Annotated[str | None, PROTOTYPE] = None
    return_perf_metrics: Annotated[bool, PROTOTYPE] = False
    perf_metrics_output_dir: Annotated[str | None, PROTOTYPE, RC27] = None
    perf_metrics_max_requests: Annotated[NonNegative, DEPRECATED] = 0
    prometheus_metrics_config: Annotated[Object | None, PROTOTYPE] = None
    enable_energy_metrics: Annotated[bool, PROTOTYPE] = False
    orchestrator_type: Annotated[Literal["rpc", "ray"] | None, PROTOTYPE] = None
    env_overrides: Annotated[dict[str, str] | None, PROTOTYPE] = None
    telemetry_config: Annotated[TelemetryConfig, PROTOTYPE] = TelemetryConfig()
    # from here on of the PyTorch backend
    generation_config: Annotated[Literal["auto", "trtllm"], PROTOTYPE, RC27] = "trtllm"
    garbage_collection_gen0_threshold: Annotated[int, BETA] = 20000
    cuda_graph_config: Annotated[CudaGraphConfig | None, BETA] = CudaGraphConfig()
    encoder_cuda_graph_config: Annotated[Object | None, PROTOTYPE, RC27] = None
    enable_encoder_decoder_mixed_cuda_graph: Annotated[bool, PROTOTYPE, RC27] = True
    multimodal_config: Annotated[Object, PROTOTYPE, RC27] = Field(default_factory=dict)
    attention_dp_config: Annotated[AttentionDpConfig | None, BETA] = None
    disable_overlap_scheduler: Annotated[bool, BETA] = False
    moe_config: Annotated[MoeConfig, BETA] = MoeConfig()
    nvfp4_gemm_config: Annotated[Nvfp4GemmConfig, BETA] = Nvfp4GemmConfig()
    dwdp_config: Annotated[Object | None, PROTOTYPE] = None
    encoder_max_batch_size: Annotated[Positive | None, PROTOTYPE] = None
    encoder_max_num_tokens: Annotated[Positive | None, PROTOTYPE] = None
    attn_backend: Annotated[str, BETA] = "TRTLLM"
    enable_mla_skip_correction: Annotated[bool, PROTOTYPE, RC27] = False
    mla_skip_correction_threshold: Annotated[float, Field(gt=0, le=32), PROTOTYPE, RC27] = 8.0
    sampler_force_async_worker: Annotated[bool, PROTOTYPE] = False
    enable_in_graph_sampling: Annotated[bool, PROTOTYPE, RC27] = False
    enable_speculative_beam_history_d2h: Annotated[bool, PROTOTYPE] = False
    enable_early_first_token_response: Annotated[bool, PROTOTYPE] = False
    enable_low_latency_host_dispatch: Annotated[bool, PROTOTYPE, RC27] = False
    enable_iter_perf_stats: Annotated[bool, PROTOTYPE] = False
    iter_perf_stats_interval: Annotated[Positive, PROTOTYPE, RC140] = 1
    enable_iter_req_stats: Annotated[bool, PROTOTYPE] = False
    print_iter_log: Annotated[bool, BETA] = False
    batch_wait_timeout_ms: Annotated[float, Field(ge=0), PROTOTYPE] = 0
    batch_wait_timeout_iters: Annotated[NonNegative, PROTOTYPE] = 0
    batch_wait_max_tokens_ratio: Annotated[float, Field(ge=0, le=1), PROTOTYPE] = 0
    torch_compile_config: Annotated[TorchCompileConfig | None, PROTOTYPE] = None
    prefill_cuda_graph_backend: Annotated[
        Literal["disabled", "piecewise", "breakable"], PROTOTYPE, RC27
    ] = "disabled"
    prefill_capture_num_tokens: Annotated[list[int] | None, PROTOTYPE, RC27] = None
    enable_autotuner: Annotated[bool, PROTOTYPE] = True
    use_fine_grained_sync: Annotated[bool, PROTOTYPE, RC27] = False
    enable_layerwise_nvtx_marker: Annotated[bool, BETA] = False
    enable_min_latency: Annotated[bool, BETA] = False
    stream_interval: Positive = 1
    force_dynamic_quantization: Annotated[bool, PROTOTYPE] = False
    allreduce_strategy: Annotated[
        Literal[
            "AUTO",
            "NCCL",
            "UB",
            "MINLATENCY",
            "ONESHOT",
            "TWOSHOT",
            "LOWPRECISION",
            "MNNVL",
            "NCCL_SYMMETRIC",
        ]
        | None,
        BETA,
    ] = "AUTO"
    checkpoint_format: Annotated[str | None, PROTOTYPE] = None
    checkpoint_io_policy: Annotated[
        Literal["auto", "native", "rank_striped_read_ahead"], PROTOTYPE, RC27
    ] = "auto"
    mx_config: Annotated[Object, PROTOTYPE] = Field(default_factory=dict)
    gms_config: Annotated[Object, PROTOTYPE] = Field(default_factory=dict)
    kv_connector_config: Annotated[Object | None, PROTOTYPE] = None
    mm_encoder_only: Annotated[bool, PROTOTYPE] = False
    disable_mm_encoder: Annotated[bool, PROTOTYPE, RC27] = False
    encode_only: Annotated[bool, PROTOTYPE] = False
    ray_worker_extension_cls: Annotated[str | None, PROTOTYPE] = None
    ray_worker_nsight_options: Annotated[dict[str, str] | None, PROTOTYPE] = None
    sleep_config: Annotated[Object | None, PROTOTYPE] = None
    reorder_policy_config: Annotated[Object | None, PROTOTYPE] = None
    enable_resource_governor: Annotated[bool, PROTOTYPE] = False
    use_cute_dsl_blockscaling_mm: Annotated[bool, PROTOTYPE] = False
    use_cute_dsl_blockscaling_bmm: Annotated[bool, PROTOTYPE] = False
    use_cute_dsl_bf16_bmm: Annotated[bool, PROTOTYPE] = False
    use_cute_dsl_bf16_gemm: Annotated[bool, PROTOTYPE] = False
    max_stats_len: Annotated[int, Field(ge=-1), PROTOTYPE] = 1000
    layer_wise_benchmarks_config: Annotated[Object, PROTOTYPE] = Field(default_factory=dict)
    backend: Annotated[Literal["pytorch"], DEPRECATED] = "pytorch"

"""`cuda_graph_config`, `moe_config`, `scheduler_config`, `attention_dp_config` and the like."""

from typing import Annotated, Literal

from pydantic import Field

from dflash_trt.tensorrt_llm.schema.base import (
    RC27,
    NonNegative,
    Object,
    Positive,
    Since,
    Upstream,
)

MoeBackend = Literal[
    "AUTO",
    "CUTLASS",
    "CUTEDSL",
    "CUTEDSL_FC12",
    "TRTLLM",
    "DEEPGEMM",
    "DENSEGEMM",
    "VANILLA",
    "TRITON",
    "MARLIN",
    "MEGAMOE_DEEPGEMM",
    "MEGAMOE_CUTEDSL",
]


class CudaGraphConfig(Upstream):
    """Of decoding; null in its place turns CUDA graphs off."""

    mode: Literal["decode"] = "decode"
    batch_sizes: list[Positive] | None = None
    max_batch_size: NonNegative = 0
    enable_padding: bool = False


class MoeConfig(Upstream):
    backend: Annotated[
        MoeBackend, Since("1.4.0rc1", "CUTEDSL_FC12"), Since("1.3.0rc27", "MEGAMOE_CUTEDSL")
    ] = "AUTO"
    max_num_tokens: int | None = None
    load_balancer: Object | str | None = None
    disable_finalize_fusion: bool = False
    use_low_precision_moe_combine: bool = False


class Nvfp4GemmConfig(Upstream):
    allowed_backends: list[Literal["cutlass", "cublaslt", "cutedsl", "cuda_core", "marlin"]] = (
        Field(default=["cutlass", "cublaslt", "cuda_core"], min_length=1)
    )


class AttentionDpConfig(Upstream):
    enable_balance: bool = False
    timeout_iters: NonNegative = 50
    batching_wait_iters: NonNegative = 10
    enable_kv_cache_aware_routing: bool = False
    kv_cache_routing_load_balance_weight: float = 1.0
    kv_cache_routing_match_rate_threshold: float = 0.1
    kv_cache_routing_fair_share_multiplier: float = 2.0
    kv_cache_routing_cold_start_warmup: bool = False
    kv_cache_routing_account_for_in_transfer: bool = False
    kv_cache_routing_conversation_affinity: bool = False
    kv_cache_routing_max_sessions: int = 65536
    kv_cache_routing_new_conv_placement: Annotated[
        Literal["round_robin", "least_queued", "least_tokens"],
        RC27,
        Since("1.4.0rc1", "least_tokens"),
    ] = "round_robin"


class DynamicBatchConfig(Upstream):
    enable_batch_size_tuning: bool = True
    enable_max_num_tokens_tuning: bool = False
    dynamic_batch_moving_average_window: int = 128


class SchedulerConfig(Upstream):
    capacity_scheduler_policy: Literal["MAX_UTILIZATION", "GUARANTEED_NO_EVICT", "STATIC_BATCH"] = (
        "GUARANTEED_NO_EVICT"
    )
    context_chunking_policy: (
        Literal["FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS", "FORCE_CHUNK"] | None
    ) = None
    dynamic_batch_config: DynamicBatchConfig | None = None
    waiting_queue_policy: Literal["fcfs", "priority"] = "fcfs"
    use_python_scheduler: bool = False
    enable_prefix_aware_scheduling: bool = True


class TorchCompileConfig(Upstream):
    enable_fullgraph: bool = True
    enable_inductor: bool = False
    enable_piecewise_cuda_graph: bool = False
    capture_num_tokens: list[Positive] | None = None
    enable_userbuffers: bool = True
    max_num_streams: Positive = 3

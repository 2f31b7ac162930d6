"""`kv_cache_config`."""

from typing import Annotated, Literal

from pydantic import Field

from dflash_trt.tensorrt_llm.schema.base import (
    DEPRECATED,
    PROTOTYPE,
    RC27,
    Fraction,
    NonNegative,
    Object,
    Positive,
    Upstream,
)


class BlockReuseConfig(Upstream):
    policy: Literal["all_reusable", "per_request", "per_conversation"] = "all_reusable"
    max_num_turns: Positive = 1


class KvCacheConfig(Upstream):
    enable_block_reuse: bool = True
    max_tokens: int | None = None
    max_attention_window: Annotated[list[Positive], Field(min_length=1)] | None = None
    sink_token_length: Annotated[int | None, DEPRECATED] = None
    free_gpu_memory_fraction: Fraction = 0.9
    host_cache_size: int | None = None
    disk_cache_size: NonNegative | None = None
    disk_cache_path: str | None = None
    cross_kv_cache_fraction: Fraction | None = None
    secondary_offload_min_priority: int | None = None
    event_buffer_max_size: int = 0
    attention_dp_events_gather_period_ms: int = 5
    kv_events_config: Annotated[Object | None, PROTOTYPE, RC27] = None
    enable_partial_reuse: bool = True
    copy_on_partial_reuse: bool = True
    use_uvm: bool = False
    max_gpu_total_bytes: NonNegative = 0
    iteration_stats_interval: Positive = 1
    dtype: Literal["auto", "float16", "bfloat16", "float32", "fp8", "fp8_ds_mla", "nvfp4"] = "auto"
    mamba_ssm_cache_dtype: Literal["auto", "float16", "bfloat16", "float32"] = "auto"
    mamba_ssm_stochastic_rounding: bool = False
    mamba_ssm_philox_rounds: Annotated[int, Field(ge=1)] = 10
    tokens_per_block: Positive = 32
    mamba_state_cache_interval: Annotated[NonNegative | None, DEPRECATED] = None
    mamba_state_config: Annotated[Object, RC27] = Field(default_factory=dict)
    use_kv_cache_manager_v2: Annotated[bool | Literal["auto"], PROTOTYPE] = "auto"
    enable_swa_scratch_reuse: Annotated[bool, PROTOTYPE] = False
    kv_cache_event_hash_algo: Annotated[
        Literal["auto", "v1_block_key", "v2_sha256", "v2_sha256_64"], PROTOTYPE
    ] = "auto"
    max_util_for_resume: Annotated[float, Field(gt=0, le=1), PROTOTYPE] = 0.95
    enable_kv_pool_rebalance: Annotated[bool, PROTOTYPE] = False
    kv_pool_rebalance_min_sampled_kv_caches: Annotated[NonNegative, PROTOTYPE, RC27] = 2000
    kv_pool_rebalance_cooldown_secs: Annotated[float, Field(ge=0), PROTOTYPE, RC27] = 120.0
    kv_pool_rebalance_target_ratio_update_interval: Annotated[Positive, PROTOTYPE, RC27] = 100
    kv_pool_rebalance_ratio_threshold: Annotated[float, Field(gt=1), PROTOTYPE, RC27] = 1.25
    kv_pool_rebalance_moving_average_decay: Annotated[float, Field(gt=0, lt=1), PROTOTYPE, RC27] = (
        0.9999
    )
    kv_pool_rebalance_check_interval: Annotated[Positive, PROTOTYPE, RC27] = 10
    disk_prefetch_num_reqs: NonNegative = 0
    fp8_context_mla_kv_len_cap: Annotated[int | None, PROTOTYPE, RC27] = None
    pool_ratio: Annotated[list[float] | None, PROTOTYPE] = None
    avg_seq_len: Annotated[Positive | None, PROTOTYPE] = None
    block_reuse_config: Annotated[BlockReuseConfig, PROTOTYPE, RC27] = BlockReuseConfig()

"""The keys of sections that are handed on as they are: upstream refuses any other.

As of `tensorrt_llm/llmapi/llm_args.py@00043967`; of `lora_config`, which moved, those of
`_torch/peft/lora/config.py@04b4c030`.
"""

from collections.abc import Mapping
from typing import Any

_THRESHOLD = ("algorithm", "seq_len_threshold")
_DSA = (
    *_THRESHOLD,
    *("index_n_heads", "index_head_dim", "index_topk", "indexer_max_chunk_size"),
    *("skip_indexer_for_short_seqs", "use_cute_dsl_topk", "use_cute_dsl_paged_mqa_logits"),
    *("q_split_threshold", "indexer_rope_interleave", "enable_heuristic_topk"),
    *("use_self_sampling_topk", "use_gvr_emission", "indexer_k_dtype"),
    "index_share_for_mtp_iteration",
)
SPARSE_ATTENTION = {  # by algorithm
    "qsa": _THRESHOLD,
    "rocket": (
        *_THRESHOLD,
        *("window_size", "kernel_size", "topr", "topk", "prompt_budget", "page_size"),
        "kt_cache_dtype",
    ),
    "dsa": _DSA,
    "deepseek_v4": (*_DSA, "compress_ratios", "window_size"),
    "skip_softmax": ("algorithm", "threshold_scale_factor", "target_sparsity"),
    "minimax_m3": (
        *("algorithm", "sparse_num_index_heads", "sparse_index_dim", "sparse_block_size"),
        *("sparse_topk_blocks", "sparse_init_blocks", "sparse_local_blocks", "sparse_score_type"),
        *("sparse_disable_index_value", "indexer_kv_dtype", "implementation"),
        *("num_attention_heads", "num_key_value_heads"),
    ),
}
KV_CACHE_COMPRESSION = {  # by algorithm
    "quantization_for_cold_page": ("algorithm", "quant", "scale_checkpoint_path"),
    "triattention": (
        *("algorithm", "eviction_mode", "normalize_scores", "budget", "beta"),
        "calibration_path",
    ),
}
BY_ALGORITHM = {
    "sparse_attention_config": SPARSE_ATTENTION,
    "kv_cache_compression_config": KV_CACHE_COMPRESSION,
}
KEYS = {
    "lora_config": (
        *("lora_dir", "lora_ckpt_source", "max_lora_rank", "lora_target_modules", "max_loras"),
        *("max_cpu_loras", "trtllm_modules_to_hf_modules", "swap_gate_up_proj_lora_b_weight"),
        *("overlap_lora_and_base", "cuda_graph_specialize_lora"),
    ),
    "prometheus_metrics_config": (
        *("e2e_request_latency_buckets", "time_to_first_token_buckets"),
        *("time_per_output_token_buckets", "request_queue_time_buckets"),
        *("request_prefill_time_buckets", "request_decode_time_buckets"),
        "request_inference_time_buckets",
    ),
    "sleep_config": ("restore_modes",),
    "encoder_cuda_graph_config": (
        *("batch_sizes", "max_batch_size", "enable_padding", "mode", "num_tokens"),
        *("max_num_token", "seq_lens", "max_seq_len"),
    ),
    "moe_config.load_balancer": (
        *("num_slots", "initial_global_assignments", "layer_updates_per_iter"),
    ),
    "peft_cache_config": (
        *("num_host_module_layer", "num_device_module_layer", "optimal_adapter_size"),
        *("max_adapter_size", "num_put_workers", "num_ensure_workers", "num_copy_streams"),
        *("max_pages_per_block_host", "max_pages_per_block_device", "device_cache_percent"),
        *("host_cache_size", "lora_prefetch_dir"),
    ),
    "cache_transceiver_config": (
        *("backend", "transceiver_runtime", "max_tokens_in_buffer", "kv_transfer_timeout_ms"),
        *("kv_transfer_sender_future_timeout_ms", "kv_transfer_poll_interval_ms"),
        *("kv_cache_bounce_size_mb", "enable_pipelined_transfer"),
    ),
    "cp_config": ("cp_type", "tokens_per_block", "use_nccl_for_alltoall", "fifo_version"),
    "dwdp_config": (
        *("dwdp_size", "num_groups", "num_experts_per_worker", "num_prefetch_experts"),
        "contention_opt",
    ),
    "multimodal_config": (
        *("encoder_cuda_graph", "encoder_side_stream_max_ahead", "encoder_cache_max_bytes"),
        *("encoder_scheduling_policy", "video_pruning_rate"),
    ),
    "mx_config": ("server_url", "server_query_timeout_s", "preshard_strategy"),
    "gms_config": ("socket_path", "mode", "tag"),
    "kv_connector_config": (
        *("connector", "connector_module", "connector_scheduler_class"),
        *("connector_worker_class", "server_url"),
    ),
    "reorder_policy_config": ("policy_name", "policy_args"),
    "layer_wise_benchmarks_config": (
        *("calibration_mode", "calibration_file_path", "calibration_layer_indices"),
    ),
    "kv_cache_config.kv_events_config": (
        *("enable_kv_cache_events", "publisher", "endpoint", "replay_endpoint", "buffer_steps"),
        *("hwm", "max_queue_size", "topic"),
    ),
    "kv_cache_config.mamba_state_config": (
        *("periodic_snapshot_interval", "additional_snapshot_offsets_from_start"),
        *("additional_snapshot_offsets_from_end", "enable_branch_snapshot"),
    ),
}


def known_keys(name: str, section: Mapping[str, Any]) -> tuple[str, ...]:
    """The keys that a section may have; none where its algorithm is not known.

    name: one of `KEYS` or `BY_ALGORITHM`.
    """
    if name in BY_ALGORITHM:
        return BY_ALGORITHM[name].get(str(section.get("algorithm")), ())
    return KEYS[name]

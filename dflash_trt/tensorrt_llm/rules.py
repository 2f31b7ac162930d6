"""How the arguments of `LLM(...)` are chosen: one table, each rule with its source.

A rule is left out where its argument is overridden, where the version does not have it, and where
the checkpoint does not say what it needs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dflash_trt.tensorrt_llm import choices
from dflash_trt.tensorrt_llm.case import Case
from dflash_trt.tensorrt_llm.choices import UNSET, Before

Choose = Callable[[Case, Before], Any]


@dataclass(frozen=True)
class Rule:
    argument: str  # of LLM(...), dotted
    choose: Choose
    how: str
    source: str


def _always(value: Any) -> Choose:
    return lambda case, chosen: value


def _with_attention_dp(value: Any) -> Choose:
    return lambda case, chosen: value if chosen["enable_attention_dp"] else UNSET


ARGS = "tensorrt_llm/llmapi/llm_args.py@00043967"
LATENCY = "examples/configs/curated/gpt-oss-120b-latency.yaml"
THROUGHPUT = "examples/configs/curated/gpt-oss-120b-throughput.yaml"
DATABASE = "examples/configs/database/openai/gpt-oss-120b/B200"
GUIDE = "docs/source/deployment-guide/deployment-guide-for-gpt-oss-on-trtllm.md"
BUDGET = "NVIDIA/TensorRT-LLM pull request 19466"
WORKER = "tensorrt_llm/_torch/speculative/dflash.py@00679c66"
ATTENTION = "tensorrt_llm/_torch/speculative/dflash_attention.py@0352547d"
FLOOR = "NVIDIA/TensorRT-LLM pull request 16888"
GATE = "tensorrt_llm/_torch/speculative/speculation_gate.py; pull request 12905"

# in the order they are chosen in; paths are those of NVIDIA/TensorRT-LLM
RULES: tuple[Rule, ...] = (
    Rule(
        "model",
        choices.model,
        "the folder `target` beside llm_args.yaml; with `checkpoints: hub` the Hub id",
        ARGS,
    ),
    Rule("revision", choices.revision, "with a Hub id the revision that was checked", ARGS),
    Rule(
        "tensor_parallel_size",
        choices.tensor_parallel_size,
        "the most of `engine.gpus` that divide the heads of both models; KV heads may be repeated",
        f"{LATENCY}; the drafter is sharded as the target (modeling_dflash.py@009d8fa4)",
    ),
    Rule(
        "gpus_per_node",
        choices.gpus_per_node,
        "of the machine, where an instance spreads over nodes",
        ARGS,
    ),
    Rule(
        "enable_attention_dp",
        choices.enable_attention_dp,
        "for throughput of a mixture of experts",
        THROUGHPUT,
    ),
    *(
        Rule(f"attention_dp_config.{name}", _with_attention_dp(value), how, THROUGHPUT)
        for name, value, how in (
            ("enable_balance", True, "on with attention-DP"),
            ("batching_wait_iters", 50, "50 with attention-DP"),
            ("timeout_iters", 1, "1 with attention-DP"),
        )
    ),
    Rule(
        "moe_expert_parallel_size",
        choices.moe_expert_parallel_size,
        "1 for latency, else over all ranks where they divide the experts",
        f"{LATENCY}; {THROUGHPUT}; {DATABASE} (EP = TP)",
    ),
    Rule(
        "moe_config.backend",
        choices.moe_backend,
        "gpt-oss: TRTLLM on SM100 and SM103, TRITON on Hopper; others: upstream's",
        GUIDE,
    ),
    Rule(
        "attn_backend",
        choices.attn_backend,
        "TRTLLM for Gemma 4, which upstream gives FlashInfer with one token a sequence",
        "user reports",
    ),
    Rule(
        "speculative_config.decoding_type",
        _always("DFlash"),
        "always",
        ARGS,
    ),
    Rule(
        "speculative_config.speculative_model",
        _always(choices.DRAFTER),
        "the folder `drafter` beside llm_args.yaml: it must be local",
        ARGS,
    ),
    Rule(
        "speculative_config.max_draft_len",
        choices.max_draft_len,
        "`speculation.draft_tokens`, else block size - 1",
        WORKER,
    ),
    Rule(
        "speculative_config.mask_token_id",
        choices.mask_token_id,
        "the checkpoint's, said again: upstream reads `dflash_config` only and falls back silently",
        ARGS,
    ),
    Rule(
        "speculative_config.target_layer_ids",
        choices.target_layer_ids,
        "the checkpoint's, said again: upstream reads `dflash_config` only and falls back silently",
        ARGS,
    ),
    Rule(
        "speculative_config.attention_backend",
        choices.attention_backend,
        "TRTLLM (paged) on SM100 and SM103, VANILLA (dense, flash-attn) elsewhere and for windows "
        "that look both ways (DFlash 2)",
        f"{ATTENTION}; pull request 19159",
    ),
    Rule(
        "kv_cache_config.enable_block_reuse",
        _always(False),
        "off: reused tokens have no hidden states, so that the drafter misses them",
        "tests/unittest/_torch/speculative; vllm-project/vllm issue 47930",
    ),
    Rule(
        "kv_cache_config.dtype",
        _always("auto"),
        "auto, which is the checkpoint's own: in a pool of another dtype than bfloat16 the drafter "
        "finds no place, and has a dense context after all",
        WORKER,
    ),
    Rule(
        "kv_cache_config.free_gpu_memory_fraction",
        choices.free_gpu_memory_fraction,
        "0.85; 0.8 where the drafter's dense context needs room of its own",
        f"{DATABASE}; {BUDGET}",
    ),
    Rule(
        "max_seq_len",
        choices.max_seq_len,
        f"`serving.max_seq_len`, else what both models have positions for, up to {choices.LONGEST}",
        BUDGET,
    ),
    Rule(
        "max_batch_size",
        choices.max_batch_size,
        "`engine.concurrency`, else "
        + ", ".join(f"{size} for {goal}" for goal, size in choices.BATCH.items())
        + "; with attention-DP a rank's share; not more than fit the dense context",
        f"{LATENCY}; {BUDGET}",
    ),
    Rule(
        "max_num_tokens",
        choices.max_num_tokens,
        "8192 for latency, else 16384; at least max_batch_size x (1 + max_draft_len)",
        f"{LATENCY}; {BUDGET}",
    ),
    Rule(
        "enable_chunked_prefill",
        choices.enable_chunked_prefill,
        "where a prompt may be longer than max_num_tokens",
        "docs/source/features/feature-combination-matrix.md@01edceae",
    ),
    Rule(
        "cuda_graph_config.enable_padding",
        _always(True),
        "on: a batch between two sizes would run without a graph",
        LATENCY,
    ),
    Rule(
        "cuda_graph_config.batch_sizes",
        choices.batch_sizes,
        "steps of an eighth or so up to max_batch_size",
        f"{LATENCY} (up to max_batch_size); {ARGS} (upstream's own steps)",
    ),
    Rule(
        "speculative_config.draft_len_schedule",
        choices.draft_len_schedule,
        "policy adaptive: fewer drafts in large batches, where the model of `plan` has them 5 % "
        "faster; blocks are drafted whole all the same. Never 0, which starves the drafter. None "
        "with attention-DP, where each rank would go by its own batch",
        f"docs/planning.md (unmeasured); {ARGS}; {FLOOR}",
    ),
    Rule(
        "speculative_config.acceptance_rate_threshold",
        choices.acceptance_rate_threshold,
        "policy adaptive and an `acceptance_rate_window_size` in `engine.args`: 0.8 of the rate "
        "below which drafts pay at no batch size, by the model of `plan`. Else none: it ends "
        "speculation for good and for everyone, and one long odd text is enough",
        f"docs/planning.md (unmeasured); {GATE}",
    ),
    Rule(
        "return_perf_metrics",
        _always(True),
        "on: acceptance of each request",
        "NVIDIA/TensorRT-LLM pull request 17082",
    ),
    Rule("stream_interval", choices.stream_interval, "20 for throughput", THROUGHPUT),
)

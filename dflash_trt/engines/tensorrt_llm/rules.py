"""How the arguments of `LLM(...)` are chosen: one table, each rule with its source.

A rule sees the case and what the rules before it have chosen, overrides of `engine.args` included.
It gives UNSET to leave upstream's default, as does one whose checkpoint fields are not known, and
one whose argument the version does not have.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from dflash_trt.checkpoints.outline import NotKnown
from dflash_trt.engines.tensorrt_llm.case import WEIGHT_BYTES, Case, heads, known, precision
from dflash_trt.engines.tensorrt_llm.memory import arena_batch, arena_budget, slot_bytes

UNSET: Any = object()
TARGET, DRAFTER = "target", "drafter"  # folders beside llm_args.yaml
LONGEST = 131072  # tokens of a sequence, where the models know more
BATCH = {"latency": 8, "balanced": 64, "throughput": 256}
PAGED = (100, 103)  # compute capabilities with the drafter's paged attention

Chosen = Mapping[str, Any]  # by dotted argument


@dataclass(frozen=True)
class Rule:
    argument: str  # of LLM(...), dotted
    choose: Callable[[Case, Chosen], Any]
    how: str
    source: str


def model(case: Case, chosen: Chosen) -> Any:
    by_hub = case.engine.checkpoints == "hub"
    return case.config.target.hub if by_hub and case.config.target.hub else TARGET


def revision(case: Case, chosen: Chosen) -> Any:
    return case.config.target.revision if chosen["model"] != TARGET else UNSET


def tensor_parallel_size(case: Case, chosen: Chosen) -> Any:
    return next(n for n in range(case.gpus, 0, -1) if not undivided(case, n))


def undivided(case: Case, ranks: int) -> list[str]:
    """What cannot be divided over so many ranks; KV heads may be repeated instead."""
    found = []
    for model in (case.target, case.drafter):
        own = heads(model)
        if own.query % ranks:
            found.append(f"the {model.role}'s {own.query} heads")
        if own.kv % ranks and ranks % own.kv:
            found.append(f"the {model.role}'s {own.kv} KV heads")
    linear = known(case.target, "linear_num_key_heads")  # of hybrids
    if linear and linear % ranks:
        found.append(f"the target's {linear} heads of linear attention")
    return found


def enable_attention_dp(case: Case, chosen: Chosen) -> Any:
    wide = case.experts is not None and chosen["tensor_parallel_size"] > 1
    return True if wide and case.engine.objective == "throughput" else UNSET


def attention_dp_config(case: Case, chosen: Chosen) -> Any:
    if not chosen["enable_attention_dp"]:
        return UNSET
    return {"enable_balance": True, "batching_wait_iters": 50, "timeout_iters": 1}


def moe_expert_parallel_size(case: Case, chosen: Chosen) -> Any:
    ranks = chosen["tensor_parallel_size"]
    if case.experts is None or ranks == 1:
        return UNSET
    return 1 if case.engine.objective == "latency" or case.experts % ranks else ranks


def moe_backend(case: Case, chosen: Chosen) -> Any:
    if not case.is_gpt_oss:
        return UNSET
    return "TRTLLM" if case.gpu.sm in PAGED else "TRITON"


def attn_backend(case: Case, chosen: Chosen) -> Any:
    return "TRTLLM" if case.architecture.startswith("Gemma4") else UNSET


def max_draft_len(case: Case, chosen: Chosen) -> Any:
    asked = case.config.speculation.draft_tokens
    return case.block_size - 1 if asked is None else asked


def attention_backend(case: Case, chosen: Chosen) -> Any:
    paged = case.gpu.sm in PAGED and not case.two_sided_windows
    return "TRTLLM" if paged else "VANILLA"


def mask_token_id(case: Case, chosen: Chosen) -> Any:
    return case.drafter.number("mask_token_id")


def target_layer_ids(case: Case, chosen: Chosen) -> Any:
    return list(case.drafter.taps)


def cache_dtype(case: Case, chosen: Chosen) -> Any:
    return "auto"


def free_gpu_memory_fraction(case: Case, chosen: Chosen) -> Any:
    return 0.85 if paged(chosen) else 0.8


def paged(chosen: Chosen) -> bool:
    """The drafter's context lies in the KV cache's pool instead of an arena of its own."""
    return bool(chosen["speculative_config.attention_backend"] == "TRTLLM")


def max_seq_len(case: Case, chosen: Chosen) -> Any:
    asked = case.config.serving.max_seq_len
    if asked is not None:
        return asked
    return min(LONGEST, *(m.number("max_position_embeddings") for m in (case.target, case.drafter)))


def max_batch_size(case: Case, chosen: Chosen) -> Any:
    alone = chosen["enable_attention_dp"]
    ranks = chosen["tensor_parallel_size"]
    wanted = case.engine.concurrency or BATCH[case.engine.objective]
    wanted = ceil(wanted / ranks) if alone else wanted
    if paged(chosen):
        return wanted
    if chosen["max_seq_len"] is None:
        return wanted
    try:
        slot = slot_bytes(case, 1 if alone else ranks, chosen["max_seq_len"], verified(chosen))
        fraction = chosen["kv_cache_config.free_gpu_memory_fraction"]
        fits = arena_batch(slot, arena_budget(case, ranks, fraction))
    except NotKnown:
        return wanted
    return max(1, min(wanted, fits))


def max_num_tokens(case: Case, chosen: Chosen) -> Any:
    least = 8192 if case.engine.objective == "latency" else 16384
    return max(least, chosen["max_batch_size"] * verified(chosen))


def verified(chosen: Chosen) -> int:
    """Tokens of one sequence that a step verifies."""
    return 1 + (chosen["speculative_config.max_draft_len"] or 0)


def enable_chunked_prefill(case: Case, chosen: Chosen) -> Any:
    length = chosen["max_seq_len"]
    return True if length is None or length > chosen["max_num_tokens"] else UNSET


def batch_sizes(case: Case, chosen: Chosen) -> Any:
    return graph_sizes(chosen["cuda_graph_config.max_batch_size"] or chosen["max_batch_size"])


def graph_sizes(largest: int) -> list[int]:
    """Few enough to capture quickly, close enough that padding to one of them costs little."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 129, 16), *range(160, 257, 32)]
    sizes += range(320, largest, 64)
    return [size for size in sizes if size < largest] + [largest]


def enable_padding(case: Case, chosen: Chosen) -> Any:
    return True


def draft_len_schedule(case: Case, chosen: Chosen) -> Any:
    if chosen["speculative_config.max_concurrency"] is not None:
        return UNSET
    full, largest = verified(chosen) - 1, chosen["max_batch_size"]
    # with attention-DP the experts see the batches of all ranks
    shared = chosen["tensor_parallel_size"] if chosen["enable_attention_dp"] else 1
    free = free_tokens(case) // shared
    if largest * (1 + full) <= free:
        return UNSET
    schedule, drafts = {max(1, free // (1 + full)): full}, full
    while max(schedule) < largest:
        drafts //= 2
        last = largest if drafts <= 1 else min(largest, free // (1 + drafts))
        if last > max(schedule):
            schedule[last] = max(1, drafts)
    return schedule


def free_tokens(case: Case) -> int:
    """Tokens of one step up to which reading the weights takes longer than multiplying by them.

    Of experts a token uses only some, so that they have work for more of them.
    """
    stored = precision(case.target)
    # MXFP4 weights are multiplied by MXFP8 activations
    multiplied = "fp8" if case.is_gpt_oss else stored
    flops = case.gpu.flops.get(multiplied, 0.0) if case.gpu.sm >= 100 or stored == "fp8" else 0.0
    flops = flops or case.gpu.flops.get("bf16", 0.0)
    tokens = flops / case.gpu.bandwidth * WEIGHT_BYTES[stored] / 2
    used = known(case.target, "num_experts_per_tok")
    if case.experts and used:
        tokens *= case.experts / used
    return int(tokens)


def enable_block_reuse(case: Case, chosen: Chosen) -> Any:
    return False


def enable_iter_perf_stats(case: Case, chosen: Chosen) -> Any:
    return True


def return_perf_metrics(case: Case, chosen: Chosen) -> Any:
    return True


def stream_interval(case: Case, chosen: Chosen) -> Any:
    return 20 if case.engine.objective == "throughput" else UNSET


def gpus_per_node(case: Case, chosen: Chosen) -> Any:
    return case.machine.gpus if case.gpus > case.machine.gpus else UNSET


ARGS = "tensorrt_llm/llmapi/llm_args.py@00043967"
LATENCY = "examples/configs/curated/gpt-oss-120b-latency.yaml"
THROUGHPUT = "examples/configs/curated/gpt-oss-120b-throughput.yaml"
DATABASE = "examples/configs/database/openai/gpt-oss-120b/B200"
GUIDE = "docs/source/deployment-guide/deployment-guide-for-gpt-oss-on-trtllm.md"
BUDGET = "NVIDIA/TensorRT-LLM pull request 19466"
WORKER = "tensorrt_llm/_torch/speculative/dflash.py@00679c66"
ATTENTION = "tensorrt_llm/_torch/speculative/dflash_attention.py@0352547d"

# in the order they are chosen in; paths are those of NVIDIA/TensorRT-LLM
RULES: tuple[Rule, ...] = (
    Rule(
        "model",
        model,
        "the folder `target` beside llm_args.yaml; with `checkpoints: hub` the Hub id",
        ARGS,
    ),
    Rule("revision", revision, "with a Hub id the revision that was checked", ARGS),
    Rule(
        "tensor_parallel_size",
        tensor_parallel_size,
        "the most of `engine.gpus` that divide the heads of both models; KV heads may be repeated",
        f"{LATENCY}; the drafter is sharded as the target (modeling_dflash.py@009d8fa4)",
    ),
    Rule(
        "gpus_per_node",
        gpus_per_node,
        "of the machine, where an instance spreads over nodes",
        ARGS,
    ),
    Rule(
        "enable_attention_dp",
        enable_attention_dp,
        "for throughput of a mixture of experts",
        THROUGHPUT,
    ),
    Rule("attention_dp_config", attention_dp_config, "with attention-DP", THROUGHPUT),
    Rule(
        "moe_expert_parallel_size",
        moe_expert_parallel_size,
        "1 for latency, else over all ranks where they divide the experts",
        f"{LATENCY}; {THROUGHPUT}; {DATABASE} (EP = TP)",
    ),
    Rule(
        "moe_config.backend",
        moe_backend,
        "gpt-oss: TRTLLM on SM100 and SM103, TRITON on Hopper; others: upstream's",
        GUIDE,
    ),
    Rule(
        "attn_backend",
        attn_backend,
        "TRTLLM for Gemma 4, which upstream gives FlashInfer with one token a sequence",
        "user reports",
    ),
    Rule(
        "speculative_config.decoding_type",
        lambda case, chosen: "DFlash",
        "always",
        ARGS,
    ),
    Rule(
        "speculative_config.speculative_model",
        lambda case, chosen: DRAFTER,
        "the folder `drafter` beside llm_args.yaml: it must be local",
        ARGS,
    ),
    Rule(
        "speculative_config.max_draft_len",
        max_draft_len,
        "`speculation.draft_tokens`, else block size - 1",
        WORKER,
    ),
    Rule(
        "speculative_config.mask_token_id",
        mask_token_id,
        "the checkpoint's, said again: upstream reads `dflash_config` only and falls back silently",
        ARGS,
    ),
    Rule(
        "speculative_config.target_layer_ids",
        target_layer_ids,
        "the checkpoint's, said again: upstream reads `dflash_config` only and falls back silently",
        ARGS,
    ),
    Rule(
        "speculative_config.attention_backend",
        attention_backend,
        "TRTLLM (paged) on SM100 and SM103, VANILLA (dense, flash-attn) elsewhere and for windows "
        "that look both ways (DFlash 2)",
        f"{ATTENTION}; pull request 19159",
    ),
    Rule(
        "kv_cache_config.enable_block_reuse",
        enable_block_reuse,
        "off: reused tokens have no hidden states, so that the drafter misses them",
        "tests/unittest/_torch/speculative; vllm-project/vllm issue 47930",
    ),
    Rule(
        "kv_cache_config.dtype",
        cache_dtype,
        "auto, which is the checkpoint's own: in a pool of another dtype than bfloat16 the drafter "
        "finds no place, and has a dense context after all",
        WORKER,
    ),
    Rule(
        "kv_cache_config.free_gpu_memory_fraction",
        free_gpu_memory_fraction,
        "0.85; 0.8 where the drafter's dense context needs room of its own",
        f"{DATABASE}; {BUDGET}",
    ),
    Rule(
        "max_seq_len",
        max_seq_len,
        f"`serving.max_seq_len`, else what both models have positions for, at most {LONGEST}",
        BUDGET,
    ),
    Rule(
        "max_batch_size",
        max_batch_size,
        "`engine.concurrency`, else "
        + ", ".join(f"{size} for {goal}" for goal, size in BATCH.items())
        + "; with attention-DP a rank's share; not more than fit the dense context",
        f"{LATENCY}; {BUDGET}",
    ),
    Rule(
        "max_num_tokens",
        max_num_tokens,
        "8192 for latency, else 16384; at least max_batch_size x (1 + max_draft_len)",
        f"{LATENCY}; {BUDGET}",
    ),
    Rule(
        "enable_chunked_prefill",
        enable_chunked_prefill,
        "where a prompt may be longer than max_num_tokens",
        "docs/source/features/feature-combination-matrix.md@01edceae",
    ),
    Rule(
        "cuda_graph_config.enable_padding",
        enable_padding,
        "on: a batch between two sizes would run without a graph",
        LATENCY,
    ),
    Rule(
        "cuda_graph_config.batch_sizes",
        batch_sizes,
        "steps of an eighth or so up to max_batch_size",
        f"{LATENCY} (up to max_batch_size); {ARGS} (upstream's own steps)",
    ),
    Rule(
        "speculative_config.draft_len_schedule",
        draft_len_schedule,
        "half as many drafts each time that a step's tokens would outgrow what the GPU multiplies "
        "while it reads the weights; none where max_batch_size never does",
        f"roofline of the machine; {ARGS}",
    ),
    Rule(
        "enable_iter_perf_stats",
        enable_iter_perf_stats,
        "on: acceptance in the metrics",
        "tensorrt_llm/metrics/collector.py",
    ),
    Rule(
        "return_perf_metrics",
        return_perf_metrics,
        "on: acceptance of each request",
        "NVIDIA/TensorRT-LLM pull request 17082",
    ),
    Rule("stream_interval", stream_interval, "20 for throughput", THROUGHPUT),
)

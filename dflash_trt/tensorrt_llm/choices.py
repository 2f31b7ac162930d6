"""The rules of `rules.py`: what each gives for its argument.

A rule sees the case and what the rules before it have chosen, overrides of `engine.args` included.
It gives UNSET to leave upstream's default.
"""

from collections.abc import Mapping
from math import ceil
from typing import Any

from dflash_trt.checkpoints.checks import NotKnown
from dflash_trt.tensorrt_llm.case import Case, heads, known
from dflash_trt.tensorrt_llm.memory import arena_batch, arena_budget, slot_bytes
from dflash_trt.tensorrt_llm.pace import pace, pays_from, schedule

UNSET: Any = object()
TARGET, DRAFTER = "target", "drafter"  # folders beside llm_args.yaml
LONGEST = 131072  # tokens of a sequence, where the models know more
BATCH = {"latency": 8, "balanced": 64, "throughput": 256}
BEST_FOR_GPT_OSS = {90: "TRITON", 100: "TRTLLM", 103: "TRTLLM"}
MARGIN = 0.8  # of the acceptance rate from which drafts pay
MOST_DRAFTS = 1024  # published drafters have up to 15
PAGED = (100, 103)  # compute capabilities with the drafter's paged attention

Before = Mapping[str, Any]  # what is chosen already, by dotted argument


def model(case: Case, chosen: Before) -> Any:
    by_hub = case.engine.checkpoints == "hub"
    return case.config.target.hub if by_hub and case.config.target.hub else TARGET


def revision(case: Case, chosen: Before) -> Any:
    return case.config.target.revision if chosen["model"] != TARGET else UNSET


def tensor_parallel_size(case: Case, chosen: Before) -> Any:
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


def enable_attention_dp(case: Case, chosen: Before) -> Any:
    wide = case.experts is not None and chosen["tensor_parallel_size"] > 1
    return True if wide and case.engine.objective == "throughput" else UNSET


def moe_expert_parallel_size(case: Case, chosen: Before) -> Any:
    ranks = chosen["tensor_parallel_size"]
    if case.experts is None or ranks == 1:
        return UNSET
    return 1 if case.engine.objective == "latency" or case.experts % ranks else ranks


def moe_backend(case: Case, chosen: Before) -> Any:
    return BEST_FOR_GPT_OSS.get(case.gpu.sm, UNSET) if case.is_gpt_oss else UNSET


def attn_backend(case: Case, chosen: Before) -> Any:
    return "TRTLLM" if case.architecture.startswith("Gemma4") else UNSET


def max_draft_len(case: Case, chosen: Before) -> Any:
    asked = case.config.speculation.draft_tokens
    return case.block_size - 1 if asked is None else asked


def attention_backend(case: Case, chosen: Before) -> Any:
    paged = case.gpu.sm in PAGED and not case.two_sided_windows
    return "TRTLLM" if paged else "VANILLA"


def mask_token_id(case: Case, chosen: Before) -> Any:
    return case.drafter.number("mask_token_id")


def target_layer_ids(case: Case, chosen: Before) -> Any:
    return list(case.drafter.taps)


def free_gpu_memory_fraction(case: Case, chosen: Before) -> Any:
    return 0.85 if paged(chosen) else 0.8


def paged(chosen: Before) -> bool:
    """The drafter's context lies in the KV cache's pool instead of an arena of its own."""
    return bool(chosen["speculative_config.attention_backend"] == "TRTLLM")


def max_seq_len(case: Case, chosen: Before) -> Any:
    asked = case.config.serving.max_seq_len
    if asked is not None:
        return asked
    return min(LONGEST, *(m.number("max_position_embeddings") for m in (case.target, case.drafter)))


def max_batch_size(case: Case, chosen: Before) -> Any:
    alone = chosen["enable_attention_dp"]
    ranks = chosen["tensor_parallel_size"]
    wanted = case.engine.concurrency or BATCH[case.engine.objective]
    wanted = ceil(wanted / ranks) if alone else wanted
    if paged(chosen) or chosen["max_seq_len"] is None:
        return wanted
    try:
        slot = slot_bytes(case, 1 if alone else ranks, chosen["max_seq_len"], verified(chosen))
        fraction = chosen["kv_cache_config.free_gpu_memory_fraction"]
        fits = arena_batch(slot, arena_budget(case, ranks, fraction))
    except NotKnown:
        return wanted
    return max(1, min(wanted, fits))


def max_num_tokens(case: Case, chosen: Before) -> Any:
    least = 8192 if case.engine.objective == "latency" else 16384
    return max(least, chosen["max_batch_size"] * verified(chosen))


def verified(chosen: Before) -> int:
    """Tokens of one sequence that a step verifies."""
    return 1 + (chosen["speculative_config.max_draft_len"] or 0)


def enable_chunked_prefill(case: Case, chosen: Before) -> Any:
    length = chosen["max_seq_len"]
    return True if length is None or length > chosen["max_num_tokens"] else UNSET


def batch_sizes(case: Case, chosen: Before) -> Any:
    return graph_sizes(chosen["cuda_graph_config.max_batch_size"] or chosen["max_batch_size"])


def graph_sizes(largest: int) -> list[int]:
    """Few enough to capture quickly, close enough that padding to one of them costs little."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 129, 16), *range(160, 257, 32)]
    sizes += range(320, largest, 64)
    return [size for size in sizes if size < largest] + [largest]


def draft_len_schedule(case: Case, chosen: Before) -> Any:
    given = chosen["speculative_config.max_concurrency"] is not None
    if given or chosen["enable_attention_dp"] or not adaptive(case, chosen):
        return UNSET
    found = schedule(pace(case, chosen), chosen["max_batch_size"])
    return found if len(found) > 1 else UNSET


def acceptance_rate_threshold(case: Case, chosen: Before) -> Any:
    window = chosen["speculative_config.acceptance_rate_window_size"]
    if not window or not adaptive(case, chosen):
        return UNSET
    pays = pays_from(pace(case, chosen), chosen["max_batch_size"])
    return round(min(MARGIN * pays, 1.0), 3)


def adaptive(case: Case, chosen: Before) -> bool:
    """There is a draft length to choose; a longer one than was trained is refused later."""
    most = min(case.block_size - 1, MOST_DRAFTS)
    drafts = chosen["speculative_config.max_draft_len"] or 0
    return case.config.speculation.policy == "adaptive" and 1 < drafts <= most


def stream_interval(case: Case, chosen: Before) -> Any:
    return 20 if case.engine.objective == "throughput" else UNSET


def gpus_per_node(case: Case, chosen: Before) -> Any:
    return case.machine.gpus if case.gpus > case.machine.gpus else UNSET

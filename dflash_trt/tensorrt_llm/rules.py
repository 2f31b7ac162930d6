"""How the arguments of `LLM(...)` are chosen: the functions that rules.yaml names, in its order.

A rule sees the deployment and what the rules before it have chosen, overrides of `engine.args`
included. It gives UNSET to leave upstream's default.
"""

from collections import UserDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from math import ceil
from typing import Any

from dflash_trt.checkpoints.checks import NotKnown
from dflash_trt.config import CHAIN, Method
from dflash_trt.planning import section
from dflash_trt.tensorrt_llm.arguments import SPECULATIVE_OF, classes, find, has, read_table
from dflash_trt.tensorrt_llm.context import Context, recompute_tail, undivided
from dflash_trt.tensorrt_llm.draft_len import pays_from, rounds_of, schedule

UNSET: Any = object()
TARGET, DRAFTER = "target", "drafter"  # folders beside llm_args.yaml
MAX_SEQ_LEN = 131072  # tokens, where the models know more
BATCH = {"latency": 8, "balanced": 64, "throughput": 256}
BEST_FOR_GPT_OSS = {90: "TRITON", 100: "TRTLLM", 103: "TRTLLM"}
MARGIN = 0.8  # of the acceptance rate from which drafts pay
MAX_DRAFTS = 1024  # published drafters have up to 15

Before = Mapping[str, Any]  # what is chosen already, by dotted argument


@dataclass(frozen=True)
class Rule:
    """A row of rules.yaml, whose head explains the fields."""

    argument: str  # of LLM(...), dotted
    how: str
    source: str
    choose: str = ""
    value: Any = None
    when: str = ""
    methods: tuple[Method, ...] = ()

    def __call__(self, context: Context, chosen: Before) -> Any:
        """Its value, or UNSET."""
        if self.choose:
            function: Callable[[Context, Before], Any] = globals()[self.choose]
            return function(context, chosen)
        return self.value if not self.when or chosen[self.when] else UNSET

    def applies(self, context: Context, chosen: "Values") -> bool:
        """It is for the method and in the version, and neither it nor its section is overridden."""
        if self.methods and context.method not in self.methods:
            return False
        parts = self.argument.split(".")
        above = [".".join(parts[:i]) for i in range(1, len(parts))]
        taken = any(chosen.data.get(name, {}) != {} for name in above)  # an empty one has defaults
        if taken or self.argument in chosen.data:
            return False
        return has(context.engine.version, find(self.argument).since)


class Values(UserDict[str, Any]):
    """Arguments by dotted name; those that are not set are upstream's defaults."""

    def __missing__(self, name: str) -> Any:
        return find(name).default


@cache
def rules() -> tuple[Rule, ...]:
    rows = read_table("rules.yaml")
    return tuple(Rule(**row | {"methods": tuple(row.get("methods", ()))}) for row in rows)


def model(context: Context, chosen: Before) -> Any:
    by_hub = context.engine.checkpoints == "hub"
    return context.config.target.hub if by_hub and context.config.target.hub else TARGET


def revision(context: Context, chosen: Before) -> Any:
    return context.config.target.revision if chosen["model"] != TARGET else UNSET


def tensor_parallel_size(context: Context, chosen: Before) -> Any:
    return next(n for n in range(context.gpus, 0, -1) if not undivided(context, n))


def gpus_per_node(context: Context, chosen: Before) -> Any:
    return context.machine.gpus if context.gpus > context.machine.gpus else UNSET


def enable_attention_dp(context: Context, chosen: Before) -> Any:
    wide = context.experts is not None and chosen["tensor_parallel_size"] > 1
    return True if wide and context.engine.objective == "throughput" else UNSET


def moe_expert_parallel_size(context: Context, chosen: Before) -> Any:
    ranks = chosen["tensor_parallel_size"]
    if context.experts is None or ranks == 1:
        return UNSET
    return 1 if context.engine.objective == "latency" or context.experts % ranks else ranks


def moe_backend(context: Context, chosen: Before) -> Any:
    return BEST_FOR_GPT_OSS.get(context.gpu.sm, UNSET) if context.is_gpt_oss else UNSET


def attn_backend(context: Context, chosen: Before) -> Any:
    return "TRTLLM" if context.target.architecture.startswith("Gemma4") else UNSET


def decoding_type(context: Context, chosen: Before) -> Any:
    return classes()[SPECULATIVE_OF[context.method]]["decoding_type"].default


def max_draft_len(context: Context, chosen: Before) -> Any:
    asked = context.config.speculation.draft_tokens
    if asked is not None:
        return asked
    return context.max_draft_len if context.in_blocks else CHAIN


def eagle3_layers_to_capture(context: Context, chosen: Before) -> Any:
    said = section(context.drafter.values, "eagle_config").get("eagle_aux_hidden_state_layer_ids")
    return list(said) if isinstance(said, list) and said else UNSET


def mask_token_id(context: Context, chosen: Before) -> Any:
    return context.drafter.number("mask_token_id")


def target_layer_ids(context: Context, chosen: Before) -> Any:
    return list(context.drafter.taps)


def attention_backend(context: Context, chosen: Before) -> Any:
    return "TRTLLM" if context.paged else "VANILLA"


def enable_block_reuse(context: Context, chosen: Before) -> Any:
    return context.reuses


def use_kv_cache_manager_v2(context: Context, chosen: Before) -> Any:
    return True if context.reuses else UNSET


def context_recompute_tail(context: Context, chosen: Before) -> Any:
    return recompute_tail(context.sizes[1]) if context.reuses else UNSET


def free_gpu_memory_fraction(context: Context, chosen: Before) -> Any:
    return 0.8 if _dense(context, chosen) else 0.85


def max_seq_len(context: Context, chosen: Before) -> Any:
    # a head of EAGLE-3 says what it was trained on, mostly 2048
    models = (context.target, context.drafter) if context.in_blocks else (context.target,)
    asked = context.config.serving.max_seq_len
    if asked is not None:
        return asked
    return min(MAX_SEQ_LEN, *(each.number("max_position_embeddings") for each in models))


def max_batch_size(context: Context, chosen: Before) -> Any:
    alone = chosen["enable_attention_dp"]
    ranks, length = chosen["tensor_parallel_size"], chosen["max_seq_len"]
    wanted = context.engine.concurrency or BATCH[context.engine.objective]
    wanted = ceil(wanted / ranks) if alone else wanted
    if not _dense(context, chosen) or length is None:
        return wanted
    try:
        slot = context.dense_slot(1 if alone else ranks, length, _verified(chosen))
        fraction = chosen["kv_cache_config.free_gpu_memory_fraction"]
        budget = context.dense_budget(ranks, fraction)
    except NotKnown:
        return wanted
    return max(1, min(wanted, budget // slot - 1))  # upstream has one more slot, for padding


def max_num_tokens(context: Context, chosen: Before) -> Any:
    least = 8192 if context.engine.objective == "latency" else 16384
    return max(least, chosen["max_batch_size"] * _verified(chosen))


def enable_chunked_prefill(context: Context, chosen: Before) -> Any:
    length = chosen["max_seq_len"]
    return True if length is None or length > chosen["max_num_tokens"] else UNSET


def batch_sizes(context: Context, chosen: Before) -> Any:
    """Few enough to capture quickly, close enough that padding to one of them costs little."""
    largest = chosen["cuda_graph_config.max_batch_size"] or chosen["max_batch_size"]
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 129, 16), *range(160, 257, 32)]
    sizes += range(320, largest, 64)
    return [size for size in sizes if size < largest] + [largest]


def draft_len_schedule(context: Context, chosen: Before) -> Any:
    given = chosen["speculative_config.max_concurrency"] is not None
    if given or chosen["enable_attention_dp"] or not _adaptive(context, chosen):
        return UNSET
    found = schedule(rounds_of(context, chosen), chosen["max_batch_size"])
    return found if len(found) > 1 else UNSET


def acceptance_rate_threshold(context: Context, chosen: Before) -> Any:
    window = chosen["speculative_config.acceptance_rate_window_size"]
    if not window or not _adaptive(context, chosen):
        return UNSET
    pays = pays_from(rounds_of(context, chosen), chosen["max_batch_size"])
    return round(min(MARGIN * pays, 1.0), 3)


def stream_interval(context: Context, chosen: Before) -> Any:
    return 20 if context.engine.objective == "throughput" else UNSET


def _dense(context: Context, chosen: Before) -> bool:
    """The drafter's context lies in an arena of its own, not in the KV cache's pool."""
    return context.in_blocks and chosen["speculative_config.attention_backend"] != "TRTLLM"


def _verified(chosen: Before) -> int:
    """Tokens of one sequence that a step verifies."""
    return 1 + (chosen["speculative_config.max_draft_len"] or 0)


def _adaptive(context: Context, chosen: Before) -> bool:
    """There is a draft length to choose; a longer one than was trained is refused later."""
    drafts = chosen["speculative_config.max_draft_len"] or 0
    adaptive = context.config.speculation.policy == "adaptive"
    return adaptive and 1 < drafts <= min(context.max_draft_len, MAX_DRAFTS)

"""Prefix reuse: what must hold for the drafter to see the end of a reused prompt.

Upstream's tests of `context_recompute_tail` (tests/unittest/_torch, TestSpecRecomputeClaimLimit,
TestV1RewindReusedContext, TestV1WindowedLayerGate) say what each KV cache manager does with it.
"""

from dflash_trt.checkpoints.checks import Found, check
from dflash_trt.config import BLOCKS
from dflash_trt.tensorrt_llm.arguments import LlmArgs, find, has
from dflash_trt.tensorrt_llm.context import Context

TAIL = "speculative_config.context_recompute_tail"


@check("error", *BLOCKS)
def reuse_of_version(context: Context, args: LlmArgs) -> Found:
    """Before, a reused prompt cannot be run again in part, and the drafter never sees it."""
    first, version = find(TAIL).since, args.version
    what = f"engine.version is {version}, serving.prefix_cache "
    what += f"recompute_tail, known from {first} on" if context.reuses else "is not given"
    fix = f"Set engine.version to {first} or later, or leave serving.prefix_cache out"
    return Found(not context.reuses or has(version, first), what, fix)


@check("error", *BLOCKS)
def reuse_with_tail(context: Context, args: LlmArgs) -> Found:
    """Arguments that take back what serving.prefix_cache asks for."""
    tail, reused = args.value(TAIL) or 0, args.kv_cache_config.enable_block_reuse
    longest = args.max_seq_len
    what = f"enable_block_reuse is {str(reused).lower()}, context_recompute_tail {tail}"
    if not context.reuses or not has(args.version, find(TAIL).since):
        return Found(True, what)
    if tail < 0:
        what += ", which runs every prompt whole"
    elif longest is not None and tail >= longest:
        what += f", and max_seq_len {longest}: nothing is ever reused"
    fine = reused and 0 < tail < (longest or tail + 1)
    return Found(fine, what, f"Leave enable_block_reuse and {TAIL} out of engine.args, or "
                 "serving.prefix_cache out of the config")  # fmt: skip


@check("warning", *BLOCKS)
def tail_without_reuse(context: Context, args: LlmArgs) -> Found:
    """Only prompts that are reused have a tail to run again."""
    tail, reused = args.value(TAIL) or 0, args.kv_cache_config.enable_block_reuse
    what = f"context_recompute_tail is {tail}, enable_block_reuse {str(reused).lower()}"
    return Found(not tail or reused, what, "Set serving.prefix_cache: recompute_tail in its place")


@check("error", *BLOCKS)
def tail_of_manager(context: Context, args: LlmArgs) -> Found:
    """KV cache manager V1 drops the tail without a word, and the drafter sees nothing."""
    if not args.value(TAIL):
        return Found(True, "there is no tail to run again")
    second = args.kv_cache_config.use_kv_cache_manager_v2 is not False
    windows = any(layer.window for layer in context.target_size.layers)
    chunks = args.enable_chunked_prefill
    what = f"KV cache manager {'V2' if second else 'V1'}, the target has "
    what += f"{'layers' if windows else 'no layer'} with a window, prompts go in "
    what += "by chunks" if chunks else "whole"
    fix = "Leave engine.args.kv_cache_config.use_kv_cache_manager_v2 out"
    return Found(second or (chunks and not windows), what, fix)


@check("warning")
def reuse_of_states(context: Context, args: LlmArgs) -> Found:
    """A state of linear attention can be reused only where a snapshot of it was kept."""
    if not args.kv_cache_config.enable_block_reuse:
        return Found(True, "nothing is reused")
    states = any(layer.state for layer in context.target_size.layers)
    kept = args.kv_cache_config.mamba_state_config
    what = "the target has layers of linear attention" if states else "no layer has a state"
    fix = "Set engine.args.kv_cache_config.mamba_state_config, and watch the reused tokens"
    return Found(not states or bool(kept), what, fix)


@check("warning")
def reuse_by_rank(context: Context, args: LlmArgs) -> Found:
    """With attention-DP each rank has a cache of its own, which another turn may miss."""
    reused, alone = args.kv_cache_config.enable_block_reuse, args.enable_attention_dp
    routed = any(
        args.value(f"attention_dp_config.{name}")
        for name in ("enable_kv_cache_aware_routing", "kv_cache_routing_conversation_affinity")
    )
    what = f"enable_block_reuse is {str(reused).lower()}, attention-DP {'on' if alone else 'off'}"
    fix = "Set engine.args.attention_dp_config.enable_kv_cache_aware_routing: true"
    return Found(not (reused and alone) or routed, what, fix)

"""Checks of memory, lengths, and prefix reuse; see `checks.py`."""

from dflash_trt.checkpoints.checks import Found, check
from dflash_trt.planning import OVERHEAD
from dflash_trt.tensorrt_llm.context import Context, weight_bytes
from dflash_trt.tensorrt_llm.schema import LlmArgs

GIB = 1 << 30
CACHE = "engine.args.kv_cache_config"


@check("error")
def weights_fit(context: Context, args: LlmArgs) -> Found:
    """Check that the weights of both models, divided over the ranks, fit a GPU with overhead."""
    ranks, gpu = args.tensor_parallel_size, context.gpu
    drafter = 0 if context.drafter.absent else weight_bytes(context.drafter)
    need = (weight_bytes(context.target) + drafter) // ranks + OVERHEAD
    return Found(
        need < gpu.memory_bytes,
        f"weights over {ranks} ranks and {OVERHEAD / GIB:.0f} GiB of overhead take "
        f"{need / GIB:.1f} GiB of each {gpu.name}, which has {gpu.memory_bytes / GIB:.1f} GiB",
        "Take more GPUs (engine.gpus), a machine with more memory, or a quantized target",
    )


@check("error", "dflash")
def dense_context(context: Context, args: LlmArgs) -> Found:
    """Check the drafter's dense context, which is outside the KV cache and grows with max_seq_len.

    The formula is upstream's own check (pull request 19466).
    """
    own, batch, length = args.speculative_config, args.max_batch_size or 0, args.max_seq_len
    if own.attention_backend == "TRTLLM":
        return Found(True, "the drafter's context lies in pages of the KV cache")
    if own.skip_ctx_buffer_budget_check or args.kv_cache_config.max_tokens is not None:
        return Found(True, "the dense context is not checked: skip_ctx_buffer_budget_check or "
                     "kv_cache_config.max_tokens is set")  # fmt: skip
    if length is None:
        return Found(True, "the dense context is not known without max_seq_len")
    slot, width = _slot(context, args), (own.max_draft_len or 0) + 1
    need = (batch + 1) * slot
    fraction = args.kv_cache_config.free_gpu_memory_fraction
    budget = context.dense_budget(args.tensor_parallel_size, fraction)
    fits = max(0, budget // slot - 1)
    return Found(
        need <= budget,
        f"the drafter's dense context takes {need / GIB:.2f} GiB of each GPU ({batch} + 1 "
        f"sequences of {length} + {width} tokens), {budget / GIB:.2f} GiB are free for it",
        f"Set max_batch_size to at most {fits}"
        if fits
        else "Lower max_seq_len, or kv_cache_config.free_gpu_memory_fraction",
    )


@check("warning", "dflash")
def cache_type_of_pool(context: Context, args: LlmArgs) -> Found:
    """Check the KV cache's dtype: with another than the drafter's, its context is dense.

    `DFlashWorker._managed_ctx_pool` (`_torch/speculative/dflash.py` at 00679c66) falls back to
    that.
    """
    dtype = args.kv_cache_config.dtype
    paged = args.speculative_config.attention_backend == "TRTLLM"
    plain = dtype in ("auto", "bfloat16")
    what = f"the KV cache's dtype is {dtype}"
    if paged and not plain and args.max_seq_len:
        need = ((args.max_batch_size or 0) + 1) * _slot(context, args)
        what += f", the drafter's bfloat16: its context may take {need / GIB:.2f} GiB of each GPU "
        what += "beside the cache"
    fix = f"Leave {CACHE}.dtype at auto, or see that there is as much room"
    return Found(not paged or plain, what, fix)


def _slot(context: Context, args: LlmArgs) -> int:
    """Return bytes per GPU of one sequence's dense context, whole on each with attention-DP."""
    ranks = 1 if args.enable_attention_dp else args.tensor_parallel_size
    width = (args.speculative_config.max_draft_len or 0) + 1
    return context.dense_slot(ranks, args.max_seq_len, width)


@check("warning")
def memory_fraction(context: Context, args: LlmArgs) -> Found:
    """Check the KV cache's fraction of memory: graphs and the drafter need the rest."""
    fraction = args.kv_cache_config.free_gpu_memory_fraction
    dense = context.in_blocks and args.speculative_config.attention_backend != "TRTLLM"
    most = 0.8 if dense else 0.9
    return Found(
        fraction is not None and fraction <= most,
        f"free_gpu_memory_fraction is {fraction}; the drafter and the CUDA graphs need what is "
        f"above {most}",
        f"Set {CACHE}.free_gpu_memory_fraction to at most {most}",
    )


@check("warning")
def concurrency_met(context: Context, args: LlmArgs) -> Found:
    """Check the concurrency: with a dense drafter context fewer sequences may fit."""
    asked = context.engine.concurrency or 0
    each = args.tensor_parallel_size if args.enable_attention_dp else 1
    together = (args.max_batch_size or 0) * each
    return Found(
        together >= asked,
        f"{together} sequences are decoded together"
        + (f", engine.concurrency is {asked}" if asked else ""),
        "Lower serving.max_seq_len, or take more GPUs or a machine with more memory",
    )


@check("warning")
def long_prompts(context: Context, args: LlmArgs) -> Found:
    """Check long prompts: without chunks, one longer than max_num_tokens is refused."""
    length, tokens = args.max_seq_len or 0, args.max_num_tokens or 0
    return Found(
        args.enable_chunked_prefill or length <= tokens,
        f"prompts go in {'by chunks' if args.enable_chunked_prefill else 'whole'}, max_num_tokens "
        f"is {tokens}, max_seq_len {length}",
        "Set enable_chunked_prefill: true",
    )


@check("error")
def positions(context: Context, args: LlmArgs) -> Found:
    """Check positions: beyond the drafter's nothing is drafted, and upstream only logs it."""
    asked, most = args.max_seq_len or 0, context.target.number("max_position_embeddings")
    what = f"max_seq_len is {asked}, the target knows {most} positions"
    if asked > most:
        return Found(False, what, f"Set max_seq_len to at most {most}")
    if not context.in_blocks:
        return Found(True, what)
    most = context.drafter.number("max_position_embeddings")
    fix = f"Set max_seq_len to at most {most}, or use a drafter trained on longer texts"
    return Found(asked <= most, f"{what}, the drafter {most}", fix, "warning")


# upstream's tests (tests/unittest/_torch, TestSpecRecomputeClaimLimit, TestV1RewindReusedContext,
# TestV1WindowedLayerGate) show how each KV cache manager treats it
TAIL = "speculative_config.context_recompute_tail"


@check("warning", "dflash")
def block_reuse(context: Context, args: LlmArgs) -> Found:
    """Check block reuse: reused tokens have no hidden states, so the drafter misses them."""
    reused, tail = args.kv_cache_config.enable_block_reuse, args.value(TAIL)
    what = f"enable_block_reuse is {lower(reused)}, of reused prompts "
    what += f"the last {tail} tokens are run again" if tail else "no token is run again"
    fix = "Set serving.prefix_cache: recompute_tail in its place; texts stay right, but acceptance "
    return Found(not reused or bool(tail), what, f"{fix}drops")


@check("error", "dflash")
def reuse_with_tail(context: Context, args: LlmArgs) -> Found:
    """Check for arguments that contradict serving.prefix_cache."""
    tail, reused = args.value(TAIL) or 0, args.kv_cache_config.enable_block_reuse
    longest = args.max_seq_len
    what = f"enable_block_reuse is {lower(reused)}, context_recompute_tail {tail}"
    if not context.reuses:
        return Found(True, what)
    if tail < 0:
        what += ", which runs every prompt whole"
    elif longest is not None and tail >= longest:
        what += f", and max_seq_len {longest}: nothing is ever reused"
    fine = reused and 0 < tail < (longest or tail + 1)
    return Found(fine, what, f"Leave enable_block_reuse and {TAIL} out of engine.args, or "
                 "serving.prefix_cache out of the config")  # fmt: skip


@check("error", "dflash")
def tail_of_manager(context: Context, args: LlmArgs) -> Found:
    """Check the KV cache manager: V1 silently drops the tail, and the drafter sees nothing."""
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
    """Check reuse with linear attention, which needs snapshots of its state."""
    if not args.kv_cache_config.enable_block_reuse:
        return Found(True, "nothing is reused")
    states = any(layer.state for layer in context.target_size.layers)
    kept = args.kv_cache_config.mamba_state_config
    what = "the target has layers of linear attention" if states else "no layer has a state"
    fix = f"Set {CACHE}.mamba_state_config, and watch the reused tokens"
    return Found(not states or bool(kept), what, fix)


@check("warning")
def reuse_by_rank(context: Context, args: LlmArgs) -> Found:
    """Check reuse with attention-DP: each rank has its own cache, which the next turn may miss."""
    reused, alone = args.kv_cache_config.enable_block_reuse, args.enable_attention_dp
    routed = any(
        args.value(f"attention_dp_config.{name}")
        for name in ("enable_kv_cache_aware_routing", "kv_cache_routing_conversation_affinity")
    )
    what = f"enable_block_reuse is {lower(reused)}, attention-DP {'on' if alone else 'off'}"
    fix = "Set engine.args.attention_dp_config.enable_kv_cache_aware_routing: true"
    return Found(not (reused and alone) or routed, what, fix)


@check("warning", "dflash", "eagle3")
def one_server(context: Context, args: LlmArgs) -> Found:
    """Check for separate prefill: generation gets no hidden states (pull request 19352)."""
    apart = args.cache_transceiver_config is not None
    what = f"prefill and generation are {'apart' if apart else 'in one server'}"
    fix = "Leave engine.args.cache_transceiver_config out; texts stay right, but acceptance drops"
    return Found(not apart, what, fix)


def lower(value: object) -> str:
    """Return a value in lower case, as YAML writes true and false."""
    return str(value).lower()

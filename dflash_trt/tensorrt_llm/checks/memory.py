"""What must fit a GPU, and how many tokens a step takes."""

from dflash_trt.checkpoints.checks import Found, check
from dflash_trt.config import BLOCKS
from dflash_trt.planning import OVERHEAD
from dflash_trt.tensorrt_llm.arguments import LlmArgs
from dflash_trt.tensorrt_llm.context import Context, weight_bytes

GIB = 1 << 30
CACHE = "engine.args.kv_cache_config"


@check("error")
def weights_fit(context: Context, args: LlmArgs) -> Found:
    """The weights of both models, divided over the ranks, leave room for everything else."""
    ranks, gpu = args.tensor_parallel_size, context.gpu
    drafter = 0 if context.drafter.absent else weight_bytes(context.drafter)
    need = (weight_bytes(context.target) + drafter) // ranks + OVERHEAD
    return Found(
        need < gpu.memory_bytes,
        f"weights over {ranks} ranks and {OVERHEAD / GIB:.0f} GiB of overhead take "
        f"{need / GIB:.1f} GiB of each {gpu.name}, which has {gpu.memory_bytes / GIB:.1f} GiB",
        "Take more GPUs (engine.gpus), a machine with more memory, or a quantised target",
    )


@check("error", *BLOCKS)
def dense_context(context: Context, args: LlmArgs) -> Found:
    """The drafter's dense context is beside the KV cache's share and grows with max_seq_len.

    The formula is upstream's own check (pull request 19466), which older versions do not have.
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


@check("warning")
def memory_fraction(context: Context, args: LlmArgs) -> Found:
    """What the KV cache takes of the free memory is not there for graphs and the drafter."""
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
    """Where the drafter's context is dense, fewer sequences may fit than are asked for."""
    asked = context.engine.concurrency or 0
    each = args.tensor_parallel_size if args.enable_attention_dp else 1
    together = (args.max_batch_size or 0) * each
    return Found(
        together >= asked,
        f"{together} sequences are decoded together"
        + (f", engine.concurrency is {asked}" if asked else ""),
        "Lower serving.max_seq_len, or take more GPUs or a machine with more memory",
    )


@check("error")
def tokens_of_a_step(context: Context, args: LlmArgs) -> Found:
    """Every sequence of a batch is verified in one step, the anchor and its drafts."""
    batch, verified = args.max_batch_size or 0, 1 + args.drafts
    asked, least = args.max_num_tokens or 0, batch * verified
    return Found(
        asked >= least,
        f"max_num_tokens is {asked}, {batch} sequences of {verified} verified tokens are {least}",
        f"Set max_num_tokens to at least {least}, or max_batch_size to at most {asked // verified}",
    )


@check("warning")
def long_prompts(context: Context, args: LlmArgs) -> Found:
    """Without chunks a prompt that is longer than max_num_tokens is refused."""
    length, tokens = args.max_seq_len or 0, args.max_num_tokens or 0
    return Found(
        args.enable_chunked_prefill or length <= tokens,
        f"prompts go in {'by chunks' if args.enable_chunked_prefill else 'whole'}, max_num_tokens "
        f"is {tokens}, max_seq_len {length}",
        "Set enable_chunked_prefill: true",
    )


@check("error")
def target_positions(context: Context, args: LlmArgs) -> Found:
    """The target knows no positions after these."""
    most, asked = context.target.number("max_position_embeddings"), args.max_seq_len or 0
    what = f"max_seq_len is {asked}, the target knows {most} positions"
    return Found(asked <= most, what, f"Set max_seq_len to at most {most}")


@check("warning", *BLOCKS)
def drafter_positions(context: Context, args: LlmArgs) -> Found:
    """After the drafter's positions a sequence drafts nothing, and upstream only logs it."""
    most, asked = context.drafter.number("max_position_embeddings"), args.max_seq_len or 0
    what = f"max_seq_len is {asked}, the drafter knows {most} positions"
    fix = f"Set max_seq_len to at most {most}, or use a drafter trained on longer texts"
    return Found(asked <= most, what, fix)


@check("warning", *BLOCKS)
def cache_type_of_pool(context: Context, args: LlmArgs) -> Found:
    """Where the pool is not of the drafter's type, its context is dense after all, beside it.

    `DFlashWorker._managed_ctx_pool` (`_torch/speculative/dflash.py` at 00679c66) falls back so.
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
    """Bytes of one sequence's dense context on each GPU; with attention-DP each has it whole."""
    ranks = 1 if args.enable_attention_dp else args.tensor_parallel_size
    width = (args.speculative_config.max_draft_len or 0) + 1
    return context.dense_slot(ranks, args.max_seq_len, width)

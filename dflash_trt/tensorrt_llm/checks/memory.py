"""What must fit a GPU, and how many tokens a step takes."""

from dflash_trt.checkpoints.checks import Found
from dflash_trt.tensorrt_llm.case import Case, weight_bytes
from dflash_trt.tensorrt_llm.chosen import LlmArgs
from dflash_trt.tensorrt_llm.memory import (
    OVERHEAD,
    arena_batch,
    arena_budget,
    attention_ranks,
    slot_bytes,
)

GIB = 1 << 30
CACHE = "engine.args.kv_cache_config"


def weights_fit(case: Case, args: LlmArgs) -> Found:
    """The weights of both models, divided over the ranks, leave room for everything else."""
    ranks = args.tensor_parallel_size
    need = (weight_bytes(case.target) + weight_bytes(case.drafter)) // ranks + OVERHEAD
    has = case.gpu.memory_bytes
    return Found(
        need < has,
        f"weights over {ranks} ranks and {OVERHEAD / GIB:.0f} GiB of overhead take "
        f"{need / GIB:.1f} GiB of each {case.gpu.name}, which has {has / GIB:.1f} GiB",
        "Take more GPUs (engine.gpus), a machine with more memory, or a quantised target",
    )


def dense_context(case: Case, args: LlmArgs) -> Found:
    """The drafter's dense context is beside the KV cache's share and grows with max_seq_len.

    The formula is upstream's own check (pull request 19466), which older versions do not have.
    """
    own, batch = args.speculative_config, args.max_batch_size or 0
    if own.attention_backend == "TRTLLM":
        return Found(True, "the drafter's context lies in pages of the KV cache")
    if own.skip_ctx_buffer_budget_check or args.kv_cache_config.max_tokens is not None:
        return Found(True, "the dense context is not checked: skip_ctx_buffer_budget_check or "
                     "kv_cache_config.max_tokens is set")  # fmt: skip
    length, width = args.max_seq_len, (own.max_draft_len or 0) + 1
    if length is None:
        return Found(True, "the dense context is not known without max_seq_len")
    fraction = args.kv_cache_config.free_gpu_memory_fraction
    slot = slot_bytes(case, attention_ranks(args), length, width)
    need = (batch + 1) * slot
    budget = arena_budget(case, args.tensor_parallel_size, fraction)
    fits = arena_batch(slot, budget)
    return Found(
        need <= budget,
        f"the drafter's dense context takes {need / GIB:.2f} GiB of each GPU ({batch} + 1 "
        f"sequences of {length} + {width} tokens), {budget / GIB:.2f} GiB are free for it",
        f"Set max_batch_size to at most {fits}"
        if fits
        else "Lower max_seq_len, or kv_cache_config.free_gpu_memory_fraction",
    )


def concurrency_met(case: Case, args: LlmArgs) -> Found:
    """Where the drafter's context is dense, fewer sequences may fit than are asked for."""
    asked = case.engine.concurrency or 0
    each = args.tensor_parallel_size if args.enable_attention_dp else 1
    together = (args.max_batch_size or 0) * each
    return Found(
        together >= asked,
        f"{together} sequences are decoded together"
        + (f", engine.concurrency is {asked}" if asked else ""),
        "Lower serving.max_seq_len, or take more GPUs or a machine with more memory",
    )


def memory_fraction(case: Case, args: LlmArgs) -> Found:
    """What the KV cache takes of the free memory is not there for graphs and the drafter."""
    fraction = args.kv_cache_config.free_gpu_memory_fraction
    most = 0.9 if args.speculative_config.attention_backend == "TRTLLM" else 0.8
    return Found(
        fraction is not None and fraction <= most,
        f"free_gpu_memory_fraction is {fraction}; the drafter and the CUDA graphs need what is "
        f"above {most}",
        f"Set {CACHE}.free_gpu_memory_fraction to at most {most}",
    )


def tokens_of_a_step(case: Case, args: LlmArgs) -> Found:
    """Every sequence of a batch is verified in one step, the anchor and its drafts."""
    batch, verified = args.max_batch_size or 0, 1 + (args.speculative_config.max_draft_len or 0)
    asked = args.max_num_tokens or 0
    return Found(
        asked >= batch * verified,
        f"max_num_tokens is {asked}, {batch} sequences of {verified} verified tokens are "
        f"{batch * verified}",
        f"Set max_num_tokens to at least {batch * verified}, or max_batch_size to at most "
        f"{asked // verified}",
    )


def long_prompts(case: Case, args: LlmArgs) -> Found:
    """Without chunks a prompt that is longer than max_num_tokens is refused."""
    length, tokens = args.max_seq_len or 0, args.max_num_tokens or 0
    return Found(
        args.enable_chunked_prefill or length <= tokens,
        f"prompts go in {'by chunks' if args.enable_chunked_prefill else 'whole'}, max_num_tokens "
        f"is {tokens}, max_seq_len {length}",
        "Set enable_chunked_prefill: true",
    )


def sequence_length_stated(case: Case, args: LlmArgs) -> Found:
    """Else upstream takes all that the models know, and sizes the drafter's context by it."""
    return Found(
        args.max_seq_len is not None,
        f"max_seq_len is {args.max_seq_len}",
        "Set serving.max_seq_len to the longest text that is served",
    )


def target_positions(case: Case, args: LlmArgs) -> Found:
    """The target knows no positions behind these."""
    most, asked = case.target.number("max_position_embeddings"), args.max_seq_len or 0
    return Found(
        asked <= most,
        f"max_seq_len is {asked}, the target knows {most} positions",
        f"Set max_seq_len to at most {most}",
    )


def drafter_positions(case: Case, args: LlmArgs) -> Found:
    """Behind the drafter's positions a sequence drafts nothing, and upstream only logs it."""
    most, asked = case.drafter.number("max_position_embeddings"), args.max_seq_len or 0
    return Found(
        asked <= most,
        f"max_seq_len is {asked}, the drafter knows {most} positions",
        f"Set max_seq_len to at most {most}, or use a drafter trained on longer texts",
    )


def block_reuse(case: Case, args: LlmArgs) -> Found:
    """Reused tokens are not run again and give no hidden states: the drafter misses them."""
    reused, tail = (
        args.kv_cache_config.enable_block_reuse,
        args.speculative_config.context_recompute_tail,
    )
    return Found(
        not reused,
        f"enable_block_reuse is {str(reused).lower()}"
        + (f", of reused prompts the last {tail} tokens are run again" if reused else ""),
        f"Set {CACHE}.enable_block_reuse: false; texts stay right, but acceptance drops",
    )


def recomputed_tail(case: Case, args: LlmArgs) -> Found:
    """Only whole blocks are run again, and only of prompts that are reused."""
    tail, block = (
        args.speculative_config.context_recompute_tail or 0,
        args.kv_cache_config.tokens_per_block,
    )
    reused = args.kv_cache_config.enable_block_reuse
    return Found(
        not tail or (reused and tail % block == 0),
        f"context_recompute_tail is {tail}, blocks have {block} tokens, enable_block_reuse is "
        f"{str(reused).lower()}",
        f"Make it a multiple of {block}, with enable_block_reuse: true, or leave it out",
    )


def cache_type_of_pool(case: Case, args: LlmArgs) -> Found:
    """Where the pool is not of the drafter's type, its context is dense after all, beside it.

    `DFlashWorker._managed_ctx_pool` (`_torch/speculative/dflash.py` at 00679c66) falls back so.
    """
    dtype, own = args.kv_cache_config.dtype, args.speculative_config
    paged = own.attention_backend == "TRTLLM"
    plain = dtype in ("auto", "bfloat16")
    what = f"the KV cache's dtype is {dtype}"
    if paged and not plain and args.max_seq_len:
        slots = (args.max_batch_size or 0) + 1
        slot = slot_bytes(
            case, attention_ranks(args), args.max_seq_len, (own.max_draft_len or 0) + 1
        )
        what += (
            f", the drafter's bfloat16: its context may take {slots * slot / GIB:.2f} GiB of each "
            "GPU beside the cache"
        )
    return Found(
        not paged or plain, what, f"Leave {CACHE}.dtype at auto, or see that there is as much room"
    )

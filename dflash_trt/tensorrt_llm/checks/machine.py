"""Ranks, GPUs and kernels."""

from dflash_trt.checkpoints.checks import Found, check
from dflash_trt.config import BLOCKS
from dflash_trt.planning import section
from dflash_trt.tensorrt_llm.arguments import LlmArgs
from dflash_trt.tensorrt_llm.context import PAGED, Context, heads, undivided
from dflash_trt.tensorrt_llm.rules import BEST_FOR_GPT_OSS

PAGES = (16, 32, 64)  # tokens; FlashInferTrtllmGenFmha.SUPPORTED_TOKENS_PER_BLOCK
RATIO = 32  # FlashInferTrtllmGenFmha.MAX_HEADS_RATIO_GENERATION
NO_KERNEL = (72, 80, 96)  # head sizes; FlashInferTrtllmGenFmha.UNSUPPORTED_HEAD_SIZES_CONTEXT
BLACKWELL_EXPERTS = ("TRTLLM", "CUTEDSL", "CUTEDSL_FC12", "MEGAMOE_CUTEDSL", "MEGAMOE_DEEPGEMM")
WHEELS = {"VANILLA": "flash-attn", "FA4": "flash-attn-4"}
LEAVE_BACKEND = "Leave engine.args.speculative_config.attention_backend out"
LEAVE_EXPERTS = "Leave engine.args.moe_config.backend out"


@check("error")
def ranks_on_machine(context: Context, args: LlmArgs) -> Found:
    """Each rank is a GPU of its own."""
    ranks = args.tensor_parallel_size * args.pipeline_parallel_size * args.context_parallel_size
    gpus = context.gpus
    what = f"the ranks are {ranks}, {context.machine.name} has {gpus} GPUs for this"
    return Found(ranks <= gpus, what, f"Set tensor_parallel_size to at most {gpus}")


@check("warning")
def no_idle_gpus(context: Context, args: LlmArgs) -> Found:
    """GPUs that are paid for and not used."""
    ranks, gpus = args.tensor_parallel_size, context.gpus
    fix = f"Set engine.gpus to {ranks}, and start {gpus // ranks} instances on this machine"
    return Found(ranks >= gpus, f"{ranks} of {gpus} GPUs are used", fix)


@check("warning")
def nvlink_domain(context: Context, args: LlmArgs) -> Found:
    """Ranks that NVLink does not join add up over the network, once for every half layer."""
    ranks, joined = args.tensor_parallel_size, context.machine.domain
    what = f"{ranks} ranks, NVLink joins {joined} GPUs of {context.machine.name}"
    return Found(ranks <= joined, what, f"Set engine.gpus to at most {joined}")


@check("error")
def heads_divide(context: Context, args: LlmArgs) -> Found:
    """Each rank has as many heads of both models; KV heads may be repeated on several."""
    left = undivided(context, args.tensor_parallel_size)
    return Found(
        not left,
        f"{args.tensor_parallel_size} ranks divide "
        + (f"not {' and '.join(left)}" if left else "the heads of both models"),
        "Set tensor_parallel_size to a power of two that divides them",
    )


@check("error")
def groups_divide(context: Context, args: LlmArgs) -> Found:
    """AWQ: each rank has whole groups of what it multiplies; `W4A16_AWQ_LinearMethod` stops."""
    quantized = section(context.target_values, "quantization_config")
    if not str(quantized.get("quant_algo")).startswith(("W4A16_AWQ", "W4A8_AWQ")):
        return Found(True, "the target has no groups of AWQ")
    query, _, dim = heads(context.target)
    inputs = query * dim, context.target.number("intermediate_size")
    group, ranks = quantized.get("group_size") or 128, args.tensor_parallel_size
    return Found(
        not any(width % (group * ranks) for width in inputs),
        f"{ranks} ranks share {' and '.join(map(str, inputs))} inputs in groups of {group}",
        "Set engine.gpus to fewer, or engine.quantize to fp8",
    )


@check("note")
def vocabulary_divides(context: Context, args: LlmArgs) -> Found:
    """Upstream pads the head where it does not; the drafts are gathered from all ranks."""
    size, ranks = context.target.number("vocab_size"), args.tensor_parallel_size
    ok = size % ranks == 0
    return Found(
        ok,
        f"the vocabulary of {size} is {'' if ok else 'not '}divided by {ranks} ranks",
        "Nothing needs to be done; another tensor_parallel_size would save the padding",
    )


@check("error")
def experts_divide(context: Context, args: LlmArgs) -> Found:
    """Upstream's mapping wants expert parallel times expert tensor parallel to be all ranks."""
    count, ranks = context.experts, args.tensor_parallel_size
    own = max(1, args.moe_expert_parallel_size or 1)  # -1 is upstream's for not given
    inner = args.moe_tensor_parallel_size or -1
    if count is None:
        what = f"the target has no experts, moe_expert_parallel_size is {own}"
        return Found(own == 1, what, "Leave moe_expert_parallel_size out")
    inner = max(1, ranks // own) if inner < 0 else inner
    return Found(
        count % own == 0 and own * inner == ranks,
        f"{count} experts over {own} x {inner} ranks (expert x tensor parallel) of {ranks}",
        f"Set moe_expert_parallel_size to a divisor of {ranks} and {count}",
    )


@check("warning")
def attention_data_parallel(context: Context, args: LlmArgs) -> Found:
    """Each rank has attention and the drafter whole; without experts nothing is shared."""
    return Found(
        not args.enable_attention_dp or context.experts is not None,
        f"enable_attention_dp is {str(args.enable_attention_dp).lower()}, the target has "
        f"{context.experts or 'no'} experts",
        "Leave it out: for a dense target start several instances instead",
    )


@check("error", *BLOCKS)
def drafter_attention(context: Context, args: LlmArgs) -> Found:
    """Upstream stops at the start where the GPU has no such kernels."""
    backend, sm = args.speculative_config.attention_backend, context.gpu.sm
    return Found(
        {"TRTLLM": sm in PAGED, "FA4": sm == 90, "VANILLA": True}[backend],
        f"the drafter's attention_backend is {backend}, {context.gpu.name} is SM{sm}",
        "Leave it out: TRTLLM is for SM100 and SM103, FA4 for SM90 (pull request 18553)",
    )


@check("error", *BLOCKS)
def drafter_windows(context: Context, args: LlmArgs) -> Found:
    """TRTLLM's kernels have no windows that look both ways (pull request 19159)."""
    backend, both = args.speculative_config.attention_backend, context.two_sided_windows
    return Found(
        not (both and backend == "TRTLLM"),
        f"the drafter's attention_backend is {backend}, its windows look "
        f"{'both ways' if both else 'back only'}",
        LEAVE_BACKEND,
    )


@check("warning", *BLOCKS)
def drafter_attention_paged(context: Context, args: LlmArgs) -> Found:
    """The others hold the whole max_seq_len of every sequence, whatever is used of it."""
    backend, could = args.speculative_config.attention_backend, context.paged
    return Found(
        backend == "TRTLLM" or not could,
        f"the drafter's attention_backend is {backend}"
        + (f", {context.gpu.name} has TRTLLM's paged one" if could else ""),
        f"{LEAVE_BACKEND}; it needs engine.version 1.3.0rc27 or later",
    )


@check("error", *BLOCKS)
def paged_attention_shapes(context: Context, args: LlmArgs) -> Found:
    """`validate_dflash_trtllm_gen_runtime` refuses other shapes, after the weights are loaded."""
    if args.speculative_config.attention_backend != "TRTLLM":
        return Found(True, "the drafter's attention is not TRTLLM's")
    (query, kv, dim), page = heads(context.drafter), args.kv_cache_config.tokens_per_block
    return Found(
        query // kv <= RATIO and dim not in NO_KERNEL and page in PAGES,
        f"the drafter has {query} heads on {kv} KV heads of {dim}, blocks have {page} tokens",
        "Set attention_backend: VANILLA, or kv_cache_config.tokens_per_block to 16, 32 or 64",
    )


@check("note", *BLOCKS)
def flash_attention_wheel(context: Context, args: LlmArgs) -> Found:
    """Both are packages that TensorRT-LLM does not bring along."""
    backend = args.speculative_config.attention_backend
    wheel = WHEELS.get(backend)
    what = f"the drafter's attention_backend is {backend}"
    what += f", which imports {wheel}" if wheel else ""
    return Found(wheel is None, what, f"Install {wheel} in the image")


@check("error")
def expert_kernels(context: Context, args: LlmArgs) -> Found:
    """Kernels of another generation: upstream stops when the first layer is made."""
    backend, sm = args.moe_config.backend, context.gpu.sm
    what = f"moe_config.backend is {backend}, {context.gpu.name} is SM{sm}"
    return Found(sm in PAGED or backend not in BLACKWELL_EXPERTS, what, LEAVE_EXPERTS)


@check("warning")
def expert_kernels_fast(context: Context, args: LlmArgs) -> Found:
    """gpt-oss has one quick kind for each generation."""
    best = BEST_FOR_GPT_OSS.get(context.gpu.sm) if context.is_gpt_oss else None
    what = f"moe_config.backend is {args.moe_config.backend}"
    what += f", the guide for gpt-oss has {best} on {context.gpu.name}" if best else ""
    return Found(best in (None, args.moe_config.backend), what, LEAVE_EXPERTS)


@check("error")
def cache_type(context: Context, args: LlmArgs) -> Found:
    """Hopper has no FP4 units."""
    dtype, gpu = args.kv_cache_config.dtype, context.gpu
    return Found(
        dtype != "nvfp4" or gpu.sm >= 100,
        f"kv_cache_config.dtype is {dtype}, {gpu.name} is SM{gpu.sm}",
        "Set engine.args.kv_cache_config.dtype to auto or fp8",
    )

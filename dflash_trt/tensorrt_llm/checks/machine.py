"""Ranks, GPUs and kernels."""

from dflash_trt.checkpoints.checks import Found
from dflash_trt.tensorrt_llm.case import Case, heads
from dflash_trt.tensorrt_llm.choices import BEST_FOR_GPT_OSS, PAGED, undivided
from dflash_trt.tensorrt_llm.chosen import LlmArgs

PAGES = (16, 32, 64)  # tokens; FlashInferTrtllmGenFmha.SUPPORTED_TOKENS_PER_BLOCK
RATIO = 32  # FlashInferTrtllmGenFmha.MAX_HEADS_RATIO_GENERATION
NO_KERNEL = (72, 80, 96)  # head sizes; FlashInferTrtllmGenFmha.UNSUPPORTED_HEAD_SIZES_CONTEXT
BLACKWELL_EXPERTS = ("TRTLLM", "CUTEDSL", "CUTEDSL_FC12", "MEGAMOE_CUTEDSL", "MEGAMOE_DEEPGEMM")


def no_pipeline(case: Case, args: LlmArgs) -> Found:
    """Taps of layers on another stage do not reach the drafter."""
    ranks = args.pipeline_parallel_size
    return Found(
        ranks == 1,
        f"pipeline_parallel_size is {ranks}",
        "Set it to 1: speculation does not go with pipeline parallelism; use tensor parallelism",
    )


def no_context_parallel(case: Case, args: LlmArgs) -> Found:
    """Speculation does not go with it upstream."""
    ranks = args.context_parallel_size
    return Found(ranks == 1, f"context_parallel_size is {ranks}", "Set it to 1")


def ranks_on_machine(case: Case, args: LlmArgs) -> Found:
    """Each rank is a GPU of its own."""
    ranks = args.tensor_parallel_size * args.pipeline_parallel_size * args.context_parallel_size
    return Found(
        ranks <= case.gpus,
        f"the ranks are {ranks}, {case.machine.name} has {case.gpus} GPUs for this",
        f"Set tensor_parallel_size to at most {case.gpus}",
    )


def no_idle_gpus(case: Case, args: LlmArgs) -> Found:
    """GPUs that are paid for and not used."""
    ranks = args.tensor_parallel_size
    return Found(
        ranks >= case.gpus,
        f"{ranks} of {case.gpus} GPUs are used",
        f"Set engine.gpus to {ranks}, and start {case.gpus // ranks} instances on this machine",
    )


def nvlink_domain(case: Case, args: LlmArgs) -> Found:
    """Ranks that NVLink does not join add up over the network, once for every half layer."""
    ranks, joined = args.tensor_parallel_size, case.machine.domain
    return Found(
        ranks <= joined,
        f"{ranks} ranks, NVLink joins {joined} GPUs of {case.machine.name}",
        f"Set engine.gpus to at most {joined}",
    )


def heads_divide(case: Case, args: LlmArgs) -> Found:
    """Each rank has as many heads of both models; KV heads may be repeated on several."""
    left = undivided(case, args.tensor_parallel_size)
    return Found(
        not left,
        f"{args.tensor_parallel_size} ranks divide "
        + (f"not {' and '.join(left)}" if left else "the heads of both models"),
        "Set tensor_parallel_size to a power of two that divides them",
    )


def vocabulary_divides(case: Case, args: LlmArgs) -> Found:
    """Upstream pads the head where it does not; the drafts are gathered from all ranks."""
    size, ranks = case.target.number("vocab_size"), args.tensor_parallel_size
    return Found(
        size % ranks == 0,
        f"the vocabulary of {size} is {'' if size % ranks == 0 else 'not '}divided by {ranks} "
        "ranks",
        "Nothing needs to be done; another tensor_parallel_size would save the padding",
    )


def experts_divide(case: Case, args: LlmArgs) -> Found:
    """Upstream's mapping wants expert parallel times expert tensor parallel to be all ranks."""
    count, ranks = case.experts, args.tensor_parallel_size
    own = max(1, args.moe_expert_parallel_size or 1)  # -1 is upstream's for not given
    inner = args.moe_tensor_parallel_size or -1
    if count is None:
        return Found(
            own == 1,
            f"the target has no experts, moe_expert_parallel_size is {own}",
            "Leave moe_expert_parallel_size out",
        )
    inner = max(1, ranks // own) if inner < 0 else inner
    return Found(
        count % own == 0 and own * inner == ranks,
        f"{count} experts over {own} x {inner} ranks (expert x tensor parallel) of {ranks}",
        f"Set moe_expert_parallel_size to a divisor of {ranks} and {count}",
    )


def attention_data_parallel(case: Case, args: LlmArgs) -> Found:
    """Each rank has attention and the drafter whole; without experts nothing is shared."""
    return Found(
        not args.enable_attention_dp or case.experts is not None,
        f"enable_attention_dp is {str(args.enable_attention_dp).lower()}, the target has "
        f"{case.experts or 'no'} experts",
        "Leave it out: for a dense target start several instances instead",
    )


def drafter_attention(case: Case, args: LlmArgs) -> Found:
    """Upstream stops at the start where the GPU has no such kernels."""
    backend, sm = args.speculative_config.attention_backend, case.gpu.sm
    runs = {"TRTLLM": sm in PAGED, "FA4": sm == 90, "VANILLA": True}[backend]
    return Found(
        runs,
        f"the drafter's attention_backend is {backend}, {case.gpu.name} is SM{sm}",
        "Leave it out: TRTLLM is for SM100 and SM103, FA4 for SM90 (pull request 18553)",
    )


def drafter_windows(case: Case, args: LlmArgs) -> Found:
    """TRTLLM's kernels have no windows that look both ways (pull request 19159)."""
    backend, both = args.speculative_config.attention_backend, case.two_sided_windows
    return Found(
        not (both and backend == "TRTLLM"),
        f"the drafter's attention_backend is {backend}, its windows look "
        f"{'both ways' if both else 'back only'}",
        "Leave engine.args.speculative_config.attention_backend out",
    )


def drafter_attention_paged(case: Case, args: LlmArgs) -> Found:
    """The others hold the whole max_seq_len of every sequence, whatever is used of it."""
    backend = args.speculative_config.attention_backend
    could = case.gpu.sm in PAGED and not case.two_sided_windows
    return Found(
        backend == "TRTLLM" or not could,
        f"the drafter's attention_backend is {backend}"
        + (f", {case.gpu.name} has TRTLLM's paged one" if could else ""),
        "Leave engine.args.speculative_config.attention_backend out; it needs engine.version "
        "1.3.0rc27 or later",
    )


def paged_attention_shapes(case: Case, args: LlmArgs) -> Found:
    """`validate_dflash_trtllm_gen_runtime` refuses other shapes, after the weights are loaded."""
    if args.speculative_config.attention_backend != "TRTLLM":
        return Found(True, "the drafter's attention is not TRTLLM's")
    own, page = heads(case.drafter), args.kv_cache_config.tokens_per_block
    fits = own.query // own.kv <= RATIO and own.dim not in NO_KERNEL and page in PAGES
    return Found(
        fits,
        f"the drafter has {own.query} heads on {own.kv} KV heads of {own.dim}, blocks have {page} "
        "tokens",
        "Set attention_backend: VANILLA, or kv_cache_config.tokens_per_block to 16, 32 or 64",
    )


def flash_attention_wheel(case: Case, args: LlmArgs) -> Found:
    """Both are packages that TensorRT-LLM does not bring along."""
    backend = args.speculative_config.attention_backend
    wheel = {"VANILLA": "flash-attn", "FA4": "flash-attn-4"}.get(backend)
    return Found(
        wheel is None,
        f"the drafter's attention_backend is {backend}"
        + (f", which imports {wheel}" if wheel else ""),
        f"Install {wheel} in the image",
    )


def target_attention(case: Case, args: LlmArgs) -> Found:
    """Only TRTLLM's metadata has the drafter's pages; FlashInfer's expects one token a sequence."""
    return Found(
        args.attn_backend.upper() == "TRTLLM",
        f"attn_backend is {args.attn_backend}",
        "Leave engine.args.attn_backend out",
    )


def expert_kernels(case: Case, args: LlmArgs) -> Found:
    """Kernels of another generation: upstream stops when the first layer is made."""
    backend, sm = args.moe_config.backend, case.gpu.sm
    return Found(
        sm in PAGED or backend not in BLACKWELL_EXPERTS,
        f"moe_config.backend is {backend}, {case.gpu.name} is SM{sm}",
        "Leave engine.args.moe_config.backend out",
    )


def expert_kernels_fast(case: Case, args: LlmArgs) -> Found:
    """gpt-oss has one quick kind for each generation."""
    best = BEST_FOR_GPT_OSS.get(case.gpu.sm) if case.is_gpt_oss else None
    backend = args.moe_config.backend
    return Found(
        backend == best or best is None,
        f"moe_config.backend is {backend}"
        + (f", the guide for gpt-oss has {best} on {case.gpu.name}" if best else ""),
        "Leave engine.args.moe_config.backend out",
    )


def cache_type(case: Case, args: LlmArgs) -> Found:
    """Hopper has no FP4 units."""
    dtype = args.kv_cache_config.dtype
    return Found(
        dtype != "nvfp4" or case.gpu.sm >= 100,
        f"kv_cache_config.dtype is {dtype}, {case.gpu.name} is SM{case.gpu.sm}",
        "Set engine.args.kv_cache_config.dtype to auto or fp8",
    )

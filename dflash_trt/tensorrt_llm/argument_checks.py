"""Checks of arguments that TensorRT-LLM accepts silently but runs badly or wrongly.

Arguments that its class or its start refuses are left to it. An error means useless drafts or wrong
texts; a warning is slow or suboptimal; a note is what users of the server may notice.
"""

from collections.abc import Collection, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from dflash_trt.checks import TENSORRT_LLM_CHECKS, Check, Finding, Found, check, checks_for, run
from dflash_trt.config import Method
from dflash_trt.planning import OVERHEAD, section
from dflash_trt.tensorrt_llm.llm_args import DRAFTER, TARGET, Context, target_bytes, weight_bytes
from dflash_trt.tensorrt_llm.schema import LlmArgs

DRAFTING: tuple[Method, ...] = ("dflash", "eagle3", "ngram")
OWN = "engine.args.speculative_config"
CACHE = "engine.args.kv_cache_config"
TAIL = "speculative_config.context_recompute_tail"
TOTAL_DRAFTS = "speculative_config.max_total_draft_tokens"
WITH_PROCESSOR = ("KimiK25",)
UPSTREAM = "https://github.com/NVIDIA/TensorRT-LLM"
GIB = 1 << 30


class Taken(NamedTuple):
    """The only values of an argument that work."""

    values: Sequence[object]
    why: str  # others do not


TAKEN = {
    "attn_backend": Taken(
        ("TRTLLM", "FLASHINFER", "VANILLA"),
        "TensorRT-LLM would silently use another",
    ),
    "load_format": Taken(("AUTO", "auto", 0), "no weights would be loaded"),
    "encode_only": Taken((False,), "it returns hidden states and generates nothing"),
    "mm_encoder_only": Taken((False,), "only the encoder of images would be there"),
    "num_postprocess_workers": Taken((0,), "texts are made by our server"),
    "orchestrator_type": Taken((None, "rpc"), "our server starts ranks by MPI"),
}
TAKEN_WITH_DRAFTS = {
    "pipeline_parallel_size": Taken(
        (1,), "hidden states do not reach the drafter from another stage"
    ),
    "context_parallel_size": Taken((1,), "speculation does not go with it"),
    "max_beam_width": Taken((1,), "with a drafter there is one beam"),
    "speculative_config.advanced_sampling_mode": Taken(
        ("full",), "requests with top_k or top_p would be sampled without them, silently"
    ),
}


# --- single values --------------------------------------------------------------------------------


@check("error")
def values_that_work(context: Context, args: LlmArgs) -> Found:
    """Check for values of the right type that upstream ignores or fails on."""
    table = dict(TAKEN)
    if context.method != "none":
        table |= TAKEN_WITH_DRAFTS
    total = args.value(TOTAL_DRAFTS)
    if total:
        table[TOTAL_DRAFTS] = Taken((args.drafts,), f"{total} is overwritten by max_draft_len")
    for name, taken in table.items():
        value = args.value(name)
        if value not in taken.values:
            what = f"engine.args.{name} is {value!r}: {taken.why}"
            values = " or ".join(map(str, taken.values))
            return Found(False, what, f"Set it to {values}, or leave it out")
    return Found(True, "no argument has a value that TensorRT-LLM drops or breaks on")


@check("error")
def forced_acceptance(context: Context, args: LlmArgs) -> Found:
    """Check for a developers' variable that forces accepting drafts: texts would be wrong."""
    name = "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS"
    if name in (args.env_overrides or {}):
        return Found(False, f"{name} is set", "Remove it from env_overrides")
    return Found(True, f"{name} is not set")


@check("warning")
def faults_known(context: Context, args: LlmArgs) -> Found:
    """Check for known faults with this GPU and feature, from public threads."""
    return look_up(args, [context.gpu.sm], context.target.architecture)


# --- drafts ---------------------------------------------------------------------------------------


@check("warning", "dflash")
def draft_length_as_trained(context: Context, args: LlmArgs) -> Found:
    """Check the number of drafts: fewer masks than in training draft worse."""
    length = args.speculative_config.max_draft_len
    trained = context.trained_draft_len
    return Found(
        length is None or length >= trained,
        f"max_draft_len is {length}, the drafter was trained to draft {trained}",
        f"Set it to {trained}, or leave it and speculation.draft_tokens out; to verify fewer give "
        f"{OWN}.draft_len_schedule, which takes the first drafts of a whole block",
    )


@check("error", "dflash")
def taps_and_mask_as_stated(context: Context, args: LlmArgs) -> Found:
    """Check taps and mask token, which upstream reads only in `dflash_config`."""
    # without them it goes on with other layers, and the vocabulary's size as mask
    drafter = context.drafter
    inside = section(drafter.values, "dflash_config")
    stated = {
        "target_layer_ids": list(drafter.taps),
        "mask_token_id": drafter.number("mask_token_id"),
    }
    for name, value in stated.items():
        given = args.speculative_config[name]
        if given != value and not (given is None and inside.get(name) == value):
            what = f"{name} is {given}, the drafter's is {value}"
            return Found(False, what, f"Leave out {OWN}.{name}: the checkpoint's is written")
    return Found(True, "target_layer_ids and mask_token_id are the drafter's")


@check("warning", *DRAFTING)
def schedule_covers_batch(context: Context, args: LlmArgs) -> Found:
    """Check the schedule: without drafts the drafter misses tokens (pull request 16888)."""
    schedule = args.speculative_config.draft_len_schedule or {}
    drafting = [rows for rows, drafts in schedule.items() if drafts]
    last = max(drafting, default=args.speculative_config.max_concurrency)
    if last is None:
        return Found(True, "speculation goes on at every batch size")
    batch = args.max_batch_size or 0
    return Found(
        last >= batch,
        f"speculation ends above a batch of {last}, max_batch_size is {batch}",
        f"Add {batch}: 1 to {OWN}.draft_len_schedule, or lower max_batch_size to {last}",
    )


@check("warning", *DRAFTING)
def acceptance_threshold(context: Context, args: LlmArgs) -> Found:
    """Check for a threshold: a few bad texts would turn speculation off until a restart."""
    limit = args.speculative_config.acceptance_rate_threshold
    what = f"acceptance_rate_threshold is {limit}"
    if limit:
        what += "; below it upstream ends speculation for good"
    fix = f"Leave out {OWN}.acceptance_rate_threshold and .acceptance_rate_window_size"
    return Found(not limit, what, f"{fix}, and watch the metrics instead")


@check("note", "dflash", "eagle3")
def sampled_requests(context: Context, args: LlmArgs) -> Found:
    """Check for rejection sampling: without it sampled requests rarely accept a draft."""
    on = args.speculative_config.use_rejection_sampling
    what = f"use_rejection_sampling is {str(on).lower()}"
    if not on:
        what += ": requests with a temperature accept fewer drafts"
    fix = f"For them set {OWN}.use_rejection_sampling: true (a prototype; FlashInfer)"
    return Found(on, what, fix)


@check("warning")
def guided_of_channels(context: Context, args: LlmArgs) -> Found:
    """Check guided decoding of gpt-oss, which needs xgrammar's structural tags."""
    # a channel opens before JSON begins (`_response_format_to_guided_decoding_params` of
    # serve/openai_protocol.py); our server refuses JSON and regular expressions otherwise, and
    # accepts grammars that include the channels
    backend = args.guided_decoding_backend
    what = f"guided_decoding_backend is {backend}, the target {context.target.architecture}"
    wrong = context.is_gpt_oss and backend == "llguidance"
    return Found(not wrong, what, "Set engine.args.guided_decoding_backend: xgrammar")


# --- ranks and kernels ----------------------------------------------------------------------------


@check("warning")
def no_idle_gpus(context: Context, args: LlmArgs) -> Found:
    """Check for unused GPUs."""
    ranks = args.tensor_parallel_size
    gpus = context.gpus
    fix = f"Set engine.gpus to {ranks}, and start {gpus // ranks} instances on this machine"
    return Found(ranks >= gpus, f"{ranks} of {gpus} GPUs are used", fix)


@check("warning")
def nvlink_domain(context: Context, args: LlmArgs) -> Found:
    """Check that NVLink joins the ranks: others all-reduce over the network in every half layer."""
    ranks = args.tensor_parallel_size
    joined = context.machine.domain
    what = f"{ranks} ranks, NVLink joins {joined} GPUs of {context.machine.name}"
    return Found(ranks <= joined, what, f"Set engine.gpus to at most {joined}")


@check("warning", "dflash")
def target_attention(context: Context, args: LlmArgs) -> Found:
    """Check the target's attention: only TRTLLM's metadata has the drafter's pages."""
    what = f"attn_backend is {args.attn_backend}"
    return Found(args.attn_backend == "TRTLLM", what, "Leave engine.args.attn_backend out")


@check("error", "dflash")
def drafter_windows(context: Context, args: LlmArgs) -> Found:
    """Check the drafter's windows: TRTLLM's kernels have no two-sided ones (pull request 19159)."""
    backend = args.speculative_config.attention_backend
    two_sided = context.two_sided_windows
    ways = "both ways" if two_sided else "back only"
    return Found(
        not (two_sided and backend == "TRTLLM"),
        f"the drafter's attention_backend is {backend}, its windows look {ways}",
        f"Leave {OWN}.attention_backend out",
    )


# --- which models -------------------------------------------------------------------------------


@check("error")
def models_as_checked(context: Context, args: LlmArgs) -> Found:
    """Check that target and drafter are those that were checked, and a Hub target has its id."""
    target = context.config.target
    place = args.value("speculative_config.speculative_model")
    if context.engine.checkpoints == "hub" and target.hub is None:
        fix = "Give target: {hub: ORG/NAME, revision: COMMIT}, or set checkpoints to copy"
        return Found(False, "engine.checkpoints is hub, the target a directory", fix)
    same = args.model == TARGET or (args.model, args.revision) == (target.hub, target.revision)
    what = f"model is {args.model}"
    if args.revision:
        what += f" at {args.revision}"
    if place:
        what += f", speculative_model {place}"
    return Found(
        same and place in (None, DRAFTER),
        what,
        f"Set the config's target and drafter; leave engine.args.model, revision and {OWN}."
        "speculative_model out",
    )


@check("error")
def remote_code(context: Context, args: LlmArgs) -> Found:
    """Check trust_remote_code, which runs code of the target's checkpoint: bundles have none."""
    trusted = args.trust_remote_code
    if trusted and context.engine.checkpoints == "copy":
        return Found(
            False,
            "engine.args.trust_remote_code is true, but engine.checkpoints: copy copies no code",
            "Set engine.checkpoints: hub, or leave trust_remote_code out",
        )
    has_code = "auto_map" in context.target.values
    has = "has" if has_code else "has no"
    what = f"the target {has} code of its own, and engine.args.trust_remote_code is {trusted}"
    fix = "set engine.args.trust_remote_code: true, which runs it where the target is loaded"
    if context.target.architecture.startswith(WITH_PROCESSOR) and not trusted:
        # `KimiK25InputProcessor` of tensorrt_llm/_torch/models/modeling_kimi_k25.py
        what += "; TensorRT-LLM's class for it loads the checkpoint's processor of images, its code"
        return Found(False, what, f"Read that code, and {fix}", "warning")
    fix = f"If TensorRT-LLM stops for want of it, {fix}"
    return Found(trusted or not has_code, what, fix, "note")


# --- memory and lengths -------------------------------------------------------------------------


@check("error")
def weights_fit(context: Context, args: LlmArgs) -> Found:
    """Check that the weights of both models, divided over the ranks, fit a GPU with overhead."""
    ranks = args.tensor_parallel_size
    gpu = context.gpu
    drafter = 0 if context.drafter.absent else weight_bytes(context.drafter)
    need = (target_bytes(context) + drafter) / ranks + OVERHEAD
    return Found(
        need < gpu.memory_bytes,
        f"weights over {ranks} ranks and {OVERHEAD / GIB:.0f} GiB of overhead take "
        f"{need / GIB:.1f} GiB of each {gpu.name}, which has {gpu.memory_bytes / GIB:.1f} GiB",
        "Take more GPUs (engine.gpus), a machine with more memory, or a quantized target",
    )


@check("warning", "dflash")
def cache_type_of_pool(context: Context, args: LlmArgs) -> Found:
    """Check the KV cache's dtype: with another than the drafter's, its context is dense."""
    # `DFlashWorker._managed_ctx_pool` (_torch/speculative/dflash.py@00679c66)
    dtype = args.kv_cache_config.dtype
    fine = dtype in ("auto", "bfloat16") or args.speculative_config.attention_backend != "TRTLLM"
    what = f"the KV cache's dtype is {dtype}"
    if not fine:
        what += ", the drafter's bfloat16"
    fix = f"Leave {CACHE}.dtype at auto, or see that its context has room beside the cache"
    return Found(fine, what, fix)


@check("warning")
def concurrency_met(context: Context, args: LlmArgs) -> Found:
    """Check the concurrency: with a dense drafter context fewer sequences may fit."""
    requested = context.engine.concurrency or 0
    batches = args.tensor_parallel_size if args.enable_attention_dp else 1
    together = (args.max_batch_size or 0) * batches
    what = f"{together} sequences are decoded together"
    if requested:
        what += f", engine.concurrency is {requested}"
    return Found(
        together >= requested,
        what,
        "Lower serving.max_seq_len, or take more GPUs or a machine with more memory",
    )


@check("error")
def positions(context: Context, args: LlmArgs) -> Found:
    """Check positions: beyond the drafter's nothing is drafted, and upstream only logs it."""
    length = args.max_seq_len or 0
    limit = context.target.number("max_position_embeddings")
    what = f"max_seq_len is {length}, the target knows {limit} positions"
    if length > limit:
        return Found(False, what, f"Set max_seq_len to at most {limit}")
    if not context.is_dflash:
        return Found(True, what)
    limit = context.drafter.number("max_position_embeddings")
    fix = f"Set max_seq_len to at most {limit}, or use a drafter trained on longer texts"
    return Found(length <= limit, f"{what}, the drafter {limit}", fix, "warning")


# upstream's tests (tests/unittest/_torch, TestSpecRecomputeClaimLimit, TestV1RewindReusedContext,
# TestV1WindowedLayerGate) show how each KV cache manager treats a tail


@check("warning", "dflash")
def block_reuse(context: Context, args: LlmArgs) -> Found:
    """Check block reuse: reused tokens have no hidden states, so the drafter misses them."""
    reused = args.kv_cache_config.enable_block_reuse
    tail = args.value(TAIL)
    what = f"enable_block_reuse is {str(reused).lower()}, of reused prompts "
    what += f"the last {tail} tokens are run again" if tail else "no token is run again"
    fix = "Set serving.prefix_cache: recompute_tail in its place; texts stay right, but acceptance "
    return Found(not reused or bool(tail), what, f"{fix}drops")


@check("error", "dflash")
def reuse_with_tail(context: Context, args: LlmArgs) -> Found:
    """Check for arguments that contradict serving.prefix_cache."""
    tail = args.value(TAIL) or 0
    reused = args.kv_cache_config.enable_block_reuse
    longest = args.max_seq_len
    what = f"enable_block_reuse is {str(reused).lower()}, context_recompute_tail {tail}"
    if not context.reuses_prefixes:
        return Found(True, what)
    if tail < 0:
        what += ", which runs every prompt whole"
    elif longest is not None and tail >= longest:
        what += f", and max_seq_len {longest}: nothing is ever reused"
    fine = reused and 0 < tail < (longest or tail + 1)
    fix = f"Leave enable_block_reuse and {TAIL} out of engine.args, or serving.prefix_cache out of "
    return Found(fine, what, f"{fix}the config")


@check("error", "dflash")
def tail_of_manager(context: Context, args: LlmArgs) -> Found:
    """Check the KV cache manager: V1 silently drops the tail, and the drafter sees nothing."""
    if not args.value(TAIL):
        return Found(True, "there is no tail to run again")
    is_v2 = args.kv_cache_config.use_kv_cache_manager_v2 is not False
    has_windows = any(layer.window for layer in context.target_size.layers)
    chunked = args.enable_chunked_prefill
    manager = "V2" if is_v2 else "V1"
    windows = "layers with a window" if has_windows else "no layer with a window"
    pieces = "by chunks" if chunked else "whole"
    what = f"KV cache manager {manager}, the target has {windows}, prompts go in {pieces}"
    fix = "Leave engine.args.kv_cache_config.use_kv_cache_manager_v2 out"
    return Found(is_v2 or (chunked and not has_windows), what, fix)


@check("warning", "dflash", "eagle3")
def one_server(context: Context, args: LlmArgs) -> Found:
    """Check for separate prefill: generation gets no hidden states (pull request 19352)."""
    if args.cache_transceiver_config is None:
        return Found(True, "prefill and generation are in one server")
    fix = "Leave engine.args.cache_transceiver_config out; texts stay right, but acceptance drops"
    return Found(False, "prefill and generation are apart", fix)


class Fault(NamedTuple):
    what: str  # with link and date
    fix: str


def look_up(args: LlmArgs, sm: Collection[int], architecture: str) -> Found:
    """Return whether known faults affect these arguments, on GPUs of these capabilities."""
    faults = list(_faults(args, sm, architecture))
    if not faults:
        return Found(True, "no known fault of TensorRT-LLM touches it")
    what = "; ".join(fault.what for fault in faults)
    return Found(False, what, "; ".join(fault.fix for fault in faults))


def _faults(args: LlmArgs, sm: Collection[int], architecture: str) -> Iterator[Fault]:
    if args.scheduler_config.capacity_scheduler_policy == "MAX_UTILIZATION":
        yield Fault(
            f"requests are dropped under MAX_UTILIZATION ({UPSTREAM}/issues/16827, July 2026)",
            "Leave engine.args.scheduler_config.capacity_scheduler_policy out",
        )
        if args.guided_decoding_backend is not None:
            yield Fault(
                "a grammar begins again when MAX_UTILIZATION has a request computed again "
                f"({UPSTREAM}/issues/18891, open, 2026-09-08)",
                "Take GUARANTEED_NO_EVICT, the default",
            )
    drafts = args.value("speculative_config.decoding_type") in ("DFlash", "Eagle3")
    if drafts and args.cache_transceiver_config is not None:
        yield Fault(
            "the drafter's KV cache is not sent from prefill to generation: acceptance is 4 % less "
            f"after short prompts, 25 % after 30,000 tokens ({UPSTREAM}/pull/17371, 2026-08-06)",
            "Leave cache_transceiver_config out",
        )
    if args.kv_connector_config is not None:
        yield Fault(
            "a KV cache connector may hang when rejected drafts give back a block "
            f"({UPSTREAM}/issues/16448, open, 2026-07-15)",
            "Leave kv_connector_config out",
        )
    if args.guided_decoding_backend is not None and architecture.startswith("Qwen3"):
        yield Fault(
            "JSON by a schema may never end with Qwen3 models "
            f"({UPSTREAM}/releases/tag/v1.4.0rc1, 2026-10-22)",
            "See that every request has a max_tokens",
        )
    gpt_oss = architecture.startswith("GptOss")
    if gpt_oss and args.tensor_parallel_size > 1:
        yield Fault(
            "gpt-oss in 4 bits on several GPUs may lose much accuracy where norm and all-reduce "
            "are fused; whether 1.4.0rc1 still does is not known "
            f"({UPSTREAM}/releases/tag/v1.3.0rc24, summer 2026)",
            "Measure accuracy before use (docs/tensorrt_llm.md, Accuracy)",
        )
    manager = args.kv_cache_config.use_kv_cache_manager_v2
    eagle = args.value("speculative_config.decoding_type") == "Eagle3"
    if gpt_oss and eagle and manager is not False:
        yield Fault(
            "KV cache manager V2 runs out of memory with gpt-oss and EAGLE-3 "
            f"({UPSTREAM}/releases/tag/v1.3.0rc26, summer 2026)",
            "Leave use_kv_cache_manager_v2 out: V1 is chosen for them",
        )
    paged = args.value("speculative_config.attention_backend") == "TRTLLM"
    # only for `doctor`
    if paged and 103 in sm and _installed_version("flashinfer-python") == "0.6.7":
        yield Fault(
            "TRTLLM attention, which the drafter's is, hangs on SM103 with FlashInfer 0.6.7 "
            "(https://github.com/flashinfer-ai/flashinfer/issues/2939, 2026-04-01)",
            "Run: pip install 'flashinfer-python!=0.6.7', as TensorRT-LLM's requirements allow it",
        )


def _installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


ARGUMENT_CHECKS: list[Check[[Context, LlmArgs]]] = [
    values_that_work,
    forced_acceptance,
    faults_known,
    draft_length_as_trained,
    taps_and_mask_as_stated,
    schedule_covers_batch,
    acceptance_threshold,
    sampled_requests,
    guided_of_channels,
    no_idle_gpus,
    nvlink_domain,
    target_attention,
    drafter_windows,
    models_as_checked,
    remote_code,
    weights_fit,
    cache_type_of_pool,
    concurrency_met,
    positions,
    block_reuse,
    reuse_with_tail,
    tail_of_manager,
    one_server,
]


def check_args(context: Context, args: LlmArgs) -> Iterator[Finding]:
    """Yield every check's finding; an error must not be deployed."""
    yield from run(checks_for(TENSORRT_LLM_CHECKS, context.method), context.pair)
    yield from run(checks_for(ARGUMENT_CHECKS, context.method), context, args)

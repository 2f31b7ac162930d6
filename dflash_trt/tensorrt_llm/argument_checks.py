"""Checks of arguments that TensorRT-LLM accepts silently but runs badly or wrongly.

Arguments that its class or its start refuses are left to it. An error means useless drafts or wrong
texts; a warning is slow or suboptimal; a note is what users of the server may notice.
"""

from collections.abc import Collection, Iterator
from importlib.metadata import PackageNotFoundError, version

from dflash_trt.checks import TENSORRT_LLM_CHECKS, Check, Finding, Found, check, checks_for, run
from dflash_trt.config import Method
from dflash_trt.planning import OVERHEAD, section
from dflash_trt.tensorrt_llm.llm_args import DRAFTER, TARGET, Context, target_bytes, weight_bytes
from dflash_trt.tensorrt_llm.schema import LlmArgs

DRAFTING: tuple[Method, ...] = ("dflash", "eagle3", "ngram")
OWN = "engine.args.speculative_config"
CACHE = "engine.args.kv_cache_config"
TAIL = "speculative_config.context_recompute_tail"
GIB = 1 << 30


# --- single values --------------------------------------------------------------------------------

# arguments with only a few working values: those values, and the reason
TAKEN: dict[str, tuple[tuple[object, ...], str]] = {
    "attn_backend": (
        ("TRTLLM", "FLASHINFER", "VANILLA"),
        "TensorRT-LLM would silently use another",
    ),
    "load_format": (("AUTO", "auto", 0), "no weights would be loaded"),
    "encode_only": ((False,), "it returns hidden states and generates nothing"),
    "mm_encoder_only": ((False,), "only the encoder of images would be there"),
    "num_postprocess_workers": ((0,), "texts are made by our server"),
    "orchestrator_type": ((None, "rpc"), "our server starts ranks by MPI"),
}
# likewise, with drafts
TAKEN_WITH_DRAFTS: dict[str, tuple[tuple[object, ...], str]] = {
    "pipeline_parallel_size": ((1,), "hidden states do not reach the drafter from another stage"),
    "context_parallel_size": ((1,), "speculation does not go with it"),
    "max_beam_width": ((1,), "with a drafter there is one beam"),
    "speculative_config.advanced_sampling_mode": (
        ("full",),
        "requests with top_k or top_p would be sampled without them, silently",
    ),
}


@check("error")
def values_that_work(context: Context, args: LlmArgs) -> Found:
    """Check for values of the right type that upstream ignores or fails on."""
    table = TAKEN | (TAKEN_WITH_DRAFTS if context.method != "none" else {})
    if total := args.value("speculative_config.max_total_draft_tokens"):
        name = "speculative_config.max_total_draft_tokens"
        table = table | {name: ((args.drafts,), f"{total} is overwritten by max_draft_len")}
    for name, (taken, why) in table.items():
        if (value := args.value(name)) not in taken:
            what = f"engine.args.{name} is {value!r}: {why}"
            return Found(False, what, f"Set it to {' or '.join(map(str, taken))}, or leave it out")
    return Found(True, "no argument has a value that TensorRT-LLM drops or breaks on")


@check("error")
def forced_acceptance(context: Context, args: LlmArgs) -> Found:
    """Check for a developers' variable that forces accepting drafts: texts would be wrong."""
    name = "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS"
    forced = name in (args.env_overrides or {})
    what = f"{name} is {'' if forced else 'not '}set"
    return Found(not forced, what, "Remove it from env_overrides")


@check("warning")
def faults_known(context: Context, args: LlmArgs) -> Found:
    """Check for known faults with this GPU and feature, from public threads."""
    return look_up(args, [context.gpu.sm], context.target.architecture)


# --- drafts ---------------------------------------------------------------------------------------


@check("warning", "dflash")
def draft_length_as_trained(context: Context, args: LlmArgs) -> Found:
    """Check the number of drafts: fewer masks than in training draft worse."""
    asked, most = args.speculative_config.max_draft_len, context.trained_draft_len
    return Found(
        asked is None or asked >= most,
        f"max_draft_len is {asked}, the drafter was trained to draft {most}",
        f"Set it to {most}, or leave it and speculation.draft_tokens out; to verify fewer give "
        f"{OWN}.draft_len_schedule, which takes the first drafts of a whole block",
    )


@check("error", "dflash")
def taps_and_mask_as_stated(context: Context, args: LlmArgs) -> Found:
    """Check taps and mask token, which upstream reads only in `dflash_config`."""
    # without them it goes on with other layers, and the vocabulary's size as mask
    drafter, own = context.drafter, args.speculative_config
    inside = section(drafter.values, "dflash_config")
    stated = {
        "target_layer_ids": list(drafter.taps),
        "mask_token_id": drafter.number("mask_token_id"),
    }
    for name, value in stated.items():
        given = own[name]
        if given != value and not (given is None and inside.get(name) == value):
            what = f"{name} is {given}, the drafter's is {value}"
            return Found(False, what, f"Leave out {OWN}.{name}: the checkpoint's is written")
    return Found(True, "target_layer_ids and mask_token_id are the drafter's")


@check("warning", *DRAFTING)
def schedule_covers_batch(context: Context, args: LlmArgs) -> Found:
    """Check the schedule: without drafts the drafter misses tokens (pull request 16888)."""
    own = args.speculative_config
    drafting = [rows for rows, drafts in (own.draft_len_schedule or {}).items() if drafts]
    last = max(drafting, default=own.max_concurrency)
    batch = args.max_batch_size or 0
    return Found(
        last is None or last >= batch,
        "speculation goes on at every batch size"
        if last is None
        else f"speculation ends above a batch of {last}, max_batch_size is {batch}",
        f"Add {batch}: 1 to {OWN}.draft_len_schedule, or lower max_batch_size to {last}",
    )


@check("warning", *DRAFTING)
def acceptance_threshold(context: Context, args: LlmArgs) -> Found:
    """Check for a threshold: a few bad texts would turn speculation off until a restart."""
    limit = args.speculative_config.acceptance_rate_threshold
    what = f"acceptance_rate_threshold is {limit}"
    what += "; below it upstream ends speculation for good" if limit else ""
    fix = f"Leave out {OWN}.acceptance_rate_threshold and .acceptance_rate_window_size"
    return Found(not limit, what, f"{fix}, and watch the metrics instead")


@check("note", "dflash", "eagle3")
def sampled_requests(context: Context, args: LlmArgs) -> Found:
    """Check for rejection sampling: without it sampled requests rarely accept a draft."""
    on = args.speculative_config.use_rejection_sampling
    what = f"use_rejection_sampling is {str(on).lower()}"
    what += "" if on else ": requests with a temperature accept fewer drafts"
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
    ranks, gpus = args.tensor_parallel_size, context.gpus
    fix = f"Set engine.gpus to {ranks}, and start {gpus // ranks} instances on this machine"
    return Found(ranks >= gpus, f"{ranks} of {gpus} GPUs are used", fix)


@check("warning")
def nvlink_domain(context: Context, args: LlmArgs) -> Found:
    """Check that NVLink joins the ranks: others all-reduce over the network in every half layer."""
    ranks, joined = args.tensor_parallel_size, context.machine.domain
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
    backend, both = args.speculative_config.attention_backend, context.two_sided_windows
    return Found(
        not (both and backend == "TRTLLM"),
        f"the drafter's attention_backend is {backend}, its windows look "
        f"{'both ways' if both else 'back only'}",
        f"Leave {OWN}.attention_backend out",
    )


# --- which models -------------------------------------------------------------------------------


@check("error")
def models_as_checked(context: Context, args: LlmArgs) -> Found:
    """Check that target and drafter are those that were checked, and a Hub target has its id."""
    target, place = context.config.target, args.value("speculative_config.speculative_model")
    if context.engine.checkpoints == "hub" and target.hub is None:
        fix = "Give target: {hub: ORG/NAME, revision: COMMIT}, or set checkpoints to copy"
        return Found(False, "engine.checkpoints is hub, the target a directory", fix)
    same = args.model == TARGET or (args.model, args.revision) == (target.hub, target.revision)
    return Found(
        same and place in (None, DRAFTER),
        f"model is {args.model}"
        + (f" at {args.revision}" if args.revision else "")
        + (f", speculative_model {place}" if place else ""),
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
    return Found(
        trusted or not has_code,
        f"the target {has} code of its own, and engine.args.trust_remote_code is {trusted}",
        "If TensorRT-LLM stops for want of it, set engine.args.trust_remote_code: true, which runs "
        "it where the target is loaded",
        "note",
    )


# --- memory and lengths -------------------------------------------------------------------------


@check("error")
def weights_fit(context: Context, args: LlmArgs) -> Found:
    """Check that the weights of both models, divided over the ranks, fit a GPU with overhead."""
    ranks, gpu = args.tensor_parallel_size, context.gpu
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
    what = f"the KV cache's dtype is {dtype}" + ("" if fine else ", the drafter's bfloat16")
    fix = f"Leave {CACHE}.dtype at auto, or see that its context has room beside the cache"
    return Found(fine, what, fix)


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


@check("error")
def positions(context: Context, args: LlmArgs) -> Found:
    """Check positions: beyond the drafter's nothing is drafted, and upstream only logs it."""
    asked, most = args.max_seq_len or 0, context.target.number("max_position_embeddings")
    what = f"max_seq_len is {asked}, the target knows {most} positions"
    if asked > most:
        return Found(False, what, f"Set max_seq_len to at most {most}")
    if not context.is_dflash:
        return Found(True, what)
    most = context.drafter.number("max_position_embeddings")
    fix = f"Set max_seq_len to at most {most}, or use a drafter trained on longer texts"
    return Found(asked <= most, f"{what}, the drafter {most}", fix, "warning")


# upstream's tests (tests/unittest/_torch, TestSpecRecomputeClaimLimit, TestV1RewindReusedContext,
# TestV1WindowedLayerGate) show how each KV cache manager treats a tail


@check("warning", "dflash")
def block_reuse(context: Context, args: LlmArgs) -> Found:
    """Check block reuse: reused tokens have no hidden states, so the drafter misses them."""
    reused, tail = args.kv_cache_config.enable_block_reuse, args.value(TAIL)
    what = f"enable_block_reuse is {str(reused).lower()}, of reused prompts "
    what += f"the last {tail} tokens are run again" if tail else "no token is run again"
    fix = "Set serving.prefix_cache: recompute_tail in its place; texts stay right, but acceptance "
    return Found(not reused or bool(tail), what, f"{fix}drops")


@check("error", "dflash")
def reuse_with_tail(context: Context, args: LlmArgs) -> Found:
    """Check for arguments that contradict serving.prefix_cache."""
    tail, reused = args.value(TAIL) or 0, args.kv_cache_config.enable_block_reuse
    longest = args.max_seq_len
    what = f"enable_block_reuse is {str(reused).lower()}, context_recompute_tail {tail}"
    if not context.reuses_prefixes:
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


@check("warning", "dflash", "eagle3")
def one_server(context: Context, args: LlmArgs) -> Found:
    """Check for separate prefill: generation gets no hidden states (pull request 19352)."""
    apart = args.cache_transceiver_config is not None
    what = f"prefill and generation are {'apart' if apart else 'in one server'}"
    fix = "Leave engine.args.cache_transceiver_config out; texts stay right, but acceptance drops"
    return Found(not apart, what, fix)


UPSTREAM = "https://github.com/NVIDIA/TensorRT-LLM"


def look_up(args: LlmArgs, sm: Collection[int], architecture: str) -> Found:
    """Return whether known faults affect these arguments, on GPUs of these capabilities."""
    found = list(_faults(args, sm, architecture))
    if not found:
        return Found(True, "no known fault of TensorRT-LLM touches it")
    return Found(False, "; ".join(each for each, _ in found), "; ".join(fix for _, fix in found))


def _faults(args: LlmArgs, sm: Collection[int], architecture: str) -> Iterator[tuple[str, str]]:
    """Yield each fault, with link and date, and its fix."""
    if args.scheduler_config.capacity_scheduler_policy == "MAX_UTILIZATION":
        yield (
            f"requests are dropped under MAX_UTILIZATION ({UPSTREAM}/issues/16827, July 2026)",
            "Leave engine.args.scheduler_config.capacity_scheduler_policy out",
        )
        if args.guided_decoding_backend is not None:
            yield (
                "a grammar begins again when MAX_UTILIZATION has a request computed again "
                f"({UPSTREAM}/issues/18891, open, 2026-09-08)",
                "Take GUARANTEED_NO_EVICT, the default",
            )
    drafts = args.value("speculative_config.decoding_type") in ("DFlash", "Eagle3")
    if drafts and args.cache_transceiver_config is not None:
        yield (
            "the drafter's KV cache is not sent from prefill to generation: acceptance is 4 % less "
            f"after short prompts, 25 % after 30,000 tokens ({UPSTREAM}/pull/17371, 2026-08-06)",
            "Leave cache_transceiver_config out",
        )
    if args.kv_connector_config is not None:
        yield (
            "a KV cache connector may hang when rejected drafts give back a block "
            f"({UPSTREAM}/issues/16448, open, 2026-07-15)",
            "Leave kv_connector_config out",
        )
    if args.guided_decoding_backend is not None and architecture.startswith("Qwen3"):
        yield (
            "JSON by a schema may never end with Qwen3 models "
            f"({UPSTREAM}/releases/tag/v1.4.0rc1, 2026-10-22)",
            "See that every request has a max_tokens",
        )
    gpt_oss = architecture.startswith("GptOss")
    if gpt_oss and args.tensor_parallel_size > 1:
        yield (
            "gpt-oss in 4 bits on several GPUs may lose much accuracy where norm and all-reduce "
            "are fused; whether 1.4.0rc1 still does is not known "
            f"({UPSTREAM}/releases/tag/v1.3.0rc24, summer 2026)",
            "Measure accuracy before use (docs/tensorrt_llm.md, Accuracy)",
        )
    manager = args.kv_cache_config.use_kv_cache_manager_v2
    eagle = args.value("speculative_config.decoding_type") == "Eagle3"
    if gpt_oss and eagle and manager is not False:
        yield (
            "KV cache manager V2 runs out of memory with gpt-oss and EAGLE-3 "
            f"({UPSTREAM}/releases/tag/v1.3.0rc26, summer 2026)",
            "Leave use_kv_cache_manager_v2 out: V1 is chosen for them",
        )
    paged = args.value("speculative_config.attention_backend") == "TRTLLM"
    # only for `doctor`
    if paged and 103 in sm and _installed_version("flashinfer-python") == "0.6.7":
        yield (
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

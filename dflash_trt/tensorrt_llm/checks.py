"""Checks of arguments that TensorRT-LLM accepts silently but runs badly or wrongly.

Arguments that its class or its start refuses are left to it. An error means useless drafts or wrong
texts; a warning is slow or suboptimal; a note is what users of the server may notice.
"""

import sys
from collections.abc import Iterator

from dflash_trt.checkpoints import TENSORRT_LLM_CHECKS, Pair
from dflash_trt.checkpoints.checks import Check, Finding, Found, check, checks_for, checks_of, run
from dflash_trt.config import BuildConfig, Method
from dflash_trt.planning import Machine, section
from dflash_trt.tensorrt_llm import memory_checks
from dflash_trt.tensorrt_llm.context import Context, undivided
from dflash_trt.tensorrt_llm.faults import look_up
from dflash_trt.tensorrt_llm.llm_args import DRAFTER, TARGET
from dflash_trt.tensorrt_llm.memory_checks import lower
from dflash_trt.tensorrt_llm.schema import LlmArgs

DRAFTING: tuple[Method, ...] = ("dflash", "eagle3", "ngram")
OWN = "engine.args.speculative_config"


def check_args(
    config: BuildConfig, pair: Pair, machine: Machine, args: LlmArgs
) -> Iterator[Finding]:
    """Yield every check's finding; an error must not be deployed.

    The pair itself has its own checks (`checkpoints.pair_findings`).
    """
    context = Context(config, pair, machine)
    yield from run(checks_for(TENSORRT_LLM_CHECKS, context.method), pair)
    yield from run(checks_for(all_checks(), context.method), context, args)


def all_checks() -> list[Check[[Context, LlmArgs]]]:
    """Return the checks below and those of `memory_checks.py`."""
    return checks_of(sys.modules[__name__], memory_checks)


# --- single values --------------------------------------------------------------------------------

# arguments with only a few working values: those values, and the reason
TAKEN: dict[str, tuple[tuple[object, ...], str]] = {
    "attn_backend": (
        ("TRTLLM", "FLASHINFER", "VANILLA"),
        "TensorRT-LLM would silently use another",
    ),
    "load_format": (("AUTO", "auto"), "no weights would be loaded"),
    "encode_only": ((False,), "an encoder generates no text"),
    "mm_encoder_only": ((False,), "an encoder generates no text"),
    "skip_tokenizer_init": ((False,), "`doctor` generates with TensorRT-LLM's tokenizer"),
    "num_postprocess_workers": ((0,), "texts are made by our server"),
    "orchestrator_type": ((None, "rpc"), "our server starts ranks by MPI"),
}
# likewise, with drafts
TAKEN_WITH_DRAFTS: dict[str, tuple[tuple[object, ...], str]] = {
    "pipeline_parallel_size": ((1,), "hidden states do not reach the drafter from another stage"),
    "context_parallel_size": ((1,), "speculation does not go with it"),
    "max_beam_width": ((1,), "with a drafter there is one beam"),
    "batched_logits_processor": ((None,), "upstream does not run it with speculation"),
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
def no_remote_code(context: Context, args: LlmArgs) -> Found:
    """Check for remote code: Python files of the checkpoint would run as the server."""
    what = f"trust_remote_code is {lower(args.trust_remote_code)}"
    fix = "Read the checkpoint's Python files first, and pin its revision"
    return Found(not args.trust_remote_code, what, fix)


@check("warning")
def faults_known(context: Context, args: LlmArgs) -> Found:
    """Check for known faults with this GPU and feature, from public threads."""
    return look_up(args, [context.gpu.sm], context.target.architecture)


# --- drafts ---------------------------------------------------------------------------------------


@check("warning", "dflash")
def draft_length_as_trained(context: Context, args: LlmArgs) -> Found:
    """Check the number of drafts: fewer masks than in training draft worse."""
    asked, most = args.speculative_config.max_draft_len, context.max_draft_len
    return Found(
        asked is None or asked >= most,
        f"max_draft_len is {asked}, the drafter was trained to draft {most}",
        f"Set it to {most}, or leave it and speculation.draft_tokens out; to verify fewer give "
        f"{OWN}.draft_len_schedule, which takes the first drafts of a whole block",
    )


@check("error", "dflash")
def taps_and_mask_as_stated(context: Context, args: LlmArgs) -> Found:
    """Check taps and mask token, which upstream reads only in `dflash_config`.

    Without them it goes on with other layers, and the vocabulary's size as mask.
    """
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


@check("error", "dflash", "eagle3")
def drafter_is_local(context: Context, args: LlmArgs) -> Found:
    """Check that the drafter is local: upstream reads its config.json before resolving Hub ids."""
    place = args.speculative_config.speculative_model
    return Found(
        place is not None and (place == DRAFTER or place.startswith(("/", "./", "../"))),
        f"speculative_model is {place}",
        f"Leave out {OWN}.speculative_model, or give a path that starts with / or ./",
    )


@check("warning", *DRAFTING)
def schedule_covers_batch(context: Context, args: LlmArgs) -> Found:
    """Check the schedule: without drafts the drafter misses tokens (pull request 16888)."""
    drafting = [rows for rows, drafts in _schedule(args).items() if drafts]
    last = max(drafting, default=args.speculative_config.max_concurrency)
    batch = args.max_batch_size or 0
    return Found(
        last is None or last >= batch,
        "speculation goes on at every batch size"
        if last is None
        else f"speculation ends above a batch of {last}, max_batch_size is {batch}",
        f"Add {batch}: 1 to {OWN}.draft_len_schedule, or lower max_batch_size to {last}",
    )


def _schedule(args: LlmArgs) -> dict[int, int]:
    return args.speculative_config.draft_len_schedule or {}


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
    what = f"use_rejection_sampling is {lower(on)}"
    what += "" if on else ": requests with a temperature accept fewer drafts"
    fix = f"For them set {OWN}.use_rejection_sampling: true (a prototype; FlashInfer)"
    return Found(on, what, fix)


@check("note", *DRAFTING)
def penalties(context: Context, args: LlmArgs) -> Found:
    """Check for penalties: requests with one are refused unless enabled."""
    on = args.speculative_config.enable_penalty
    what = f"enable_penalty is {lower(on)}"
    what += "" if on else ": requests with a repetition, presence or frequency penalty are refused"
    return Found(on, what, f"For them set {OWN}.enable_penalty: true (a prototype)")


@check("warning")
def guided_of_channels(context: Context, args: LlmArgs) -> Found:
    """Check guided decoding of gpt-oss, which needs xgrammar's structural tags.

    It opens a channel before JSON begins (`_response_format_to_guided_decoding_params` of
    `tensorrt_llm/serve/openai_protocol.py`). The server refuses JSON and regular expressions
    otherwise, and accepts grammars that include the channels.
    """
    backend = args.guided_decoding_backend
    what = f"guided_decoding_backend is {backend}, the target {context.target.architecture}"
    wrong = context.is_gpt_oss and backend == "llguidance"
    return Found(not wrong, what, "Set engine.args.guided_decoding_backend: xgrammar")


# --- ranks and kernels ----------------------------------------------------------------------------


@check("error")
def heads_divide(context: Context, args: LlmArgs) -> Found:
    """Check that ranks divide the heads of both models; KV heads may be repeated on several."""
    left = undivided(context, args.tensor_parallel_size)
    return Found(
        not left,
        f"{args.tensor_parallel_size} ranks divide "
        + (f"not {' and '.join(left)}" if left else "the heads of both models"),
        "Set tensor_parallel_size to a power of two that divides them",
    )


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


@check("warning")
def attention_data_parallel(context: Context, args: LlmArgs) -> Found:
    """Check attention DP: ranks hold attention and drafter whole, which pays only with experts."""
    return Found(
        not args.enable_attention_dp or context.experts is not None,
        f"enable_attention_dp is {lower(args.enable_attention_dp)}, the target has "
        f"{context.experts or 'no'} experts",
        "Leave it out: for a dense target start several instances instead",
    )


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


# --- where the target comes from ------------------------------------------------------------------


@check("error")
def hub_target(context: Context, args: LlmArgs) -> Found:
    """Check that `checkpoints: hub` comes with a Hub id."""
    kept, hub = context.engine.checkpoints, context.config.target.hub
    return Found(
        kept != "hub" or hub is not None,
        f"engine.checkpoints is {kept}, the target {hub or 'a directory'}",
        "Give target: {hub: ORG/NAME, revision: COMMIT}, or set engine.checkpoints to copy or link",
    )


@check("error")
def target_as_checked(context: Context, args: LlmArgs) -> Found:
    """Check that the target and its revision are those that were checked."""
    target = context.config.target
    return Found(
        args.model == TARGET or (args.model, args.revision) == (target.hub, target.revision),
        f"model is {args.model}" + (f" at {args.revision}" if args.revision else ""),
        "Set the config's target, and leave engine.args.model and revision out",
    )

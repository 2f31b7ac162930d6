"""Draft length, taps, mask and the schedule by batch size."""

from collections.abc import Sequence

from dflash_trt.checkpoints import first_generation
from dflash_trt.checkpoints.checks import Found, check
from dflash_trt.config import BLOCKS
from dflash_trt.tensorrt_llm.arguments import LlmArgs, has
from dflash_trt.tensorrt_llm.context import Context
from dflash_trt.tensorrt_llm.rules import DRAFTER

CONFIG = "engine.args.speculative_config"


@check("error", *BLOCKS)
def generation_of_version(context: Context, args: LlmArgs) -> Found:
    """Older versions do not have the convolutions and the selector of DFlash 2."""
    _, what, fix, _ = found = first_generation.look(context.pair)
    ok = found.ok or has(args.version, "1.4.0rc0")
    return Found(ok, f"{what}; engine.version is {args.version}", fix)


@check("warning", *BLOCKS)
def windows_of_version(context: Context, args: LlmArgs) -> Found:
    """Older versions run layers with a window without it (pull request 16914, August 2026)."""
    return Found(
        not context.windows or has(args.version, "1.3.0rc27"),
        f"layers of the drafter have {'a' if context.windows else 'no'} window, engine.version is "
        f"{args.version}",
        "Set engine.version to 1.3.0rc27 or later",
    )


@check("error", *BLOCKS)
def draft_length(context: Context, args: LlmArgs) -> Found:
    """Upstream stops at the start when asked for a wider block than the trained one."""
    asked, most = args.speculative_config.max_draft_len, context.max_draft_len
    return Found(
        asked is not None and 1 <= asked <= most,
        f"max_draft_len is {asked}, the drafter was trained to draft {most} (block_size "
        f"{most + 1})",
        f"Set {CONFIG}.max_draft_len from 1 to {most}, or leave it out",
    )


@check("warning", *BLOCKS)
def draft_length_as_trained(context: Context, args: LlmArgs) -> Found:
    """Fewer masks than in training draft worse; upstream's examples have 4 for every drafter."""
    asked, most = args.speculative_config.max_draft_len, context.max_draft_len
    return Found(
        asked is None or asked >= most,
        f"max_draft_len is {asked}, the drafter was trained to draft {most}",
        f"Set it to {most}, or leave it and speculation.draft_tokens out; to verify fewer give "
        f"{CONFIG}.draft_len_schedule, which takes the first drafts of a whole block",
    )


@check("error", *BLOCKS)
def taps_as_stated(context: Context, args: LlmArgs) -> Found:
    """Other layers than in training give features that the drafter has never seen."""
    taps, given = list(context.drafter.taps), args.speculative_config.target_layer_ids
    return Found(
        _kept(context, "target_layer_ids", taps, given),
        f"target_layer_ids is {_list(given)}, the drafter's taps are {_list(taps)}"
        + ("; upstream looks for them in dflash_config only" if given is None else ""),
        f"Leave out {CONFIG}.target_layer_ids: the checkpoint's are written",
    )


@check("error", *BLOCKS)
def mask_as_stated(context: Context, args: LlmArgs) -> Found:
    """Without the id in `dflash_config` upstream silently takes vocab_size."""
    mask, given = context.drafter.number("mask_token_id"), args.speculative_config.mask_token_id
    return Found(
        _kept(context, "mask_token_id", mask, given),
        f"mask_token_id is {given}, the drafter's is {mask}",
        f"Leave out {CONFIG}.mask_token_id: the checkpoint's is written",
    )


@check("error", *BLOCKS, "eagle3", "draft_model")
def drafter_is_local(context: Context, args: LlmArgs) -> Found:
    """Upstream reads the drafter's config.json before it resolves Hub ids, and goes on without."""
    place = args.speculative_config.speculative_model
    return Found(
        place is not None and (place == DRAFTER or place.startswith(("/", "./", "../"))),
        f"speculative_model is {place}",
        f"Leave out {CONFIG}.speculative_model, or give a path that starts with / or ./",
    )


@check("error", *BLOCKS, "eagle3", "draft_model", "ngram")
def schedule_starts_full(context: Context, args: LlmArgs) -> Found:
    """Upstream wants max_draft_len at the smallest batch size."""
    full, schedule = args.speculative_config.max_draft_len, _schedule(args)
    first = schedule[min(schedule)] if schedule else full
    what = f"draft_len_schedule begins with {first} drafts, max_draft_len is {full}"
    return Found(first == full, what, f"Give its smallest batch size {full} drafts")


@check("error", *BLOCKS, "eagle3", "draft_model", "ngram")
def schedule_within_length(context: Context, args: LlmArgs) -> Found:
    """Upstream refuses more drafts than max_draft_len."""
    full = args.speculative_config.max_draft_len or 0
    most = max(_schedule(args).values(), default=0)
    what = f"draft_len_schedule asks for up to {most} drafts, max_draft_len is {full}"
    return Found(most <= full, what, f"Give no batch size more than {full}")


@check("warning", *BLOCKS, "eagle3", "draft_model", "ngram")
def schedule_covers_batch(context: Context, args: LlmArgs) -> Found:
    """Without drafts the drafter misses tokens, and drafts badly later (pull request 16888)."""
    drafting = [rows for rows, drafts in _schedule(args).items() if drafts]
    last = max(drafting, default=args.speculative_config.max_concurrency)
    batch = args.max_batch_size or 0
    return Found(
        last is None or last >= batch,
        "speculation goes on at every batch size"
        if last is None
        else f"speculation ends above a batch of {last}, max_batch_size is {batch}",
        f"Add {batch}: 1 to {CONFIG}.draft_len_schedule, or lower max_batch_size to {last}",
    )


@check("warning", *BLOCKS, "eagle3", "draft_model", "ngram")
def schedule_on_one_rank(context: Context, args: LlmArgs) -> Found:
    """With attention-DP each rank goes by its own batch, and graphs are for one length of each."""
    alone = bool(args.enable_attention_dp) and args.tensor_parallel_size > 1
    schedule = _schedule(args)
    return Found(
        not alone or not schedule,
        f"enable_attention_dp is {str(alone).lower()}, draft_len_schedule is "
        f"{schedule or 'not given'}",
        f"Leave out {CONFIG}.draft_len_schedule",
    )


@check("error")
def forced_acceptance(context: Context, args: LlmArgs) -> Found:
    """The texts are wrong: a developers' variable accepts drafts whatever the target says."""
    name = "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS"
    forced = name in (args.env_overrides or {})
    what = f"{name} is {'' if forced else 'not '}set"
    return Found(not forced, what, "Remove it from env_overrides")


def _kept(context: Context, name: str, stated: object, given: object) -> bool:
    """What is given is what the checkpoint states; null is, where upstream finds that."""
    inside = context.drafter.values.get("dflash_config")
    found = isinstance(inside, dict) and inside.get(name) == stated
    return given == stated or (given is None and found)


def _schedule(args: LlmArgs) -> dict[int, int]:
    return args.speculative_config.draft_len_schedule or {}


def _list(taps: Sequence[int] | None) -> str:
    return ", ".join(map(str, taps)) if taps else "not given"

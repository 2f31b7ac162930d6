"""Draft length, taps, mask and the schedule by batch size."""

from collections.abc import Sequence

from dflash_trt.checkpoints.checks import Found
from dflash_trt.checkpoints.checks.tensorrt_llm import first_generation
from dflash_trt.tensorrt_llm.case import Case
from dflash_trt.tensorrt_llm.choices import DRAFTER
from dflash_trt.tensorrt_llm.chosen import LlmArgs
from dflash_trt.tensorrt_llm.schema import has

CONFIG = "engine.args.speculative_config"


def generation_of_version(case: Case, args: LlmArgs) -> Found:
    """Older versions do not have the convolutions and the selector of DFlash 2."""
    found, version = first_generation.look(case.pair), case.engine.version
    return Found(
        found.ok or has(version, "1.4.0rc0"),
        f"{found.what}; engine.version is {version}",
        found.fix,
    )


def windows_of_version(case: Case, args: LlmArgs) -> Found:
    """Older versions run layers with a window without it (pull request 16914, August 2026)."""
    version = case.engine.version
    return Found(
        not case.windows or has(version, "1.3.0rc27"),
        f"layers of the drafter have {'a' if case.windows else 'no'} window, engine.version is "
        f"{version}",
        "Set engine.version to 1.3.0rc27 or later",
    )


def draft_length(case: Case, args: LlmArgs) -> Found:
    """Upstream stops at the start when asked for a wider block than the trained one."""
    asked, most = args.speculative_config.max_draft_len, case.block_size - 1
    return Found(
        asked is not None and 1 <= asked <= most,
        f"max_draft_len is {asked}, the drafter was trained to draft {most} (block_size "
        f"{case.block_size})",
        f"Set {CONFIG}.max_draft_len from 1 to {most}, or leave it out",
    )


def draft_length_as_trained(case: Case, args: LlmArgs) -> Found:
    """Fewer masks than in training draft worse; upstream's examples have 4 for every drafter."""
    asked, most = args.speculative_config.max_draft_len, case.block_size - 1
    return Found(
        asked is None or asked >= most,
        f"max_draft_len is {asked}, the drafter was trained to draft {most}",
        f"Set it to {most}, or leave it and speculation.draft_tokens out; to verify fewer give "
        f"{CONFIG}.draft_len_schedule, which takes the first drafts of a whole block",
    )


def taps_as_stated(case: Case, args: LlmArgs) -> Found:
    """Other layers than in training give features that the drafter has never seen."""
    taps, given = case.drafter.taps, args.speculative_config.target_layer_ids
    inside = case.drafter.values.get("dflash_config")
    kept = isinstance(inside, dict) and inside.get("target_layer_ids") == list(taps)
    return Found(
        given == list(taps) or (given is None and kept),
        f"target_layer_ids is {_list(given)}, the drafter's taps are {_list(taps)}"
        + ("; upstream looks for them in dflash_config only" if given is None else ""),
        f"Leave out {CONFIG}.target_layer_ids: the checkpoint's are written",
    )


def mask_as_stated(case: Case, args: LlmArgs) -> Found:
    """Without the id in `dflash_config` upstream silently takes vocab_size."""
    mask, given = case.drafter.number("mask_token_id"), args.speculative_config.mask_token_id
    inside = case.drafter.values.get("dflash_config")
    kept = isinstance(inside, dict) and inside.get("mask_token_id") == mask
    return Found(
        given == mask or (given is None and kept),
        f"mask_token_id is {given}, the drafter's is {mask}",
        f"Leave out {CONFIG}.mask_token_id: the checkpoint's is written",
    )


def drafter_is_local(case: Case, args: LlmArgs) -> Found:
    """Upstream reads the drafter's config.json before it resolves Hub ids, and goes on without."""
    place = args.speculative_config.speculative_model
    local = place is not None and (place == DRAFTER or place.startswith(("/", "./", "../")))
    return Found(
        local,
        f"speculative_model is {place}",
        f"Leave out {CONFIG}.speculative_model, or give a path that starts with / or ./",
    )


def schedule_starts_full(case: Case, args: LlmArgs) -> Found:
    """Upstream wants max_draft_len at the smallest batch size."""
    full, schedule = args.speculative_config.max_draft_len, _schedule(args)
    first = schedule[min(schedule)] if schedule else full
    return Found(
        first == full,
        f"draft_len_schedule begins with {first} drafts, max_draft_len is {full}",
        f"Give its smallest batch size {full} drafts",
    )


def schedule_within_length(case: Case, args: LlmArgs) -> Found:
    """Upstream refuses more drafts than max_draft_len."""
    full, schedule = args.speculative_config.max_draft_len or 0, _schedule(args)
    most = max(schedule.values(), default=0)
    return Found(
        most <= full,
        f"draft_len_schedule asks for up to {most} drafts, max_draft_len is {full}",
        f"Give no batch size more than {full}",
    )


def schedule_covers_batch(case: Case, args: LlmArgs) -> Found:
    """Without drafts the drafter misses tokens, and drafts badly later (pull request 16888)."""
    drafting = [rows for rows, drafts in _schedule(args).items() if drafts]
    last, batch = max(drafting, default=None), args.max_batch_size or 0
    last = args.speculative_config.max_concurrency if last is None else last
    return Found(
        last is None or last >= batch,
        "speculation goes on at every batch size"
        if last is None
        else f"speculation ends above a batch of {last}, max_batch_size is {batch}",
        f"Add {batch}: 1 to {CONFIG}.draft_len_schedule, or lower max_batch_size to {last}",
    )


def schedule_or_concurrency(case: Case, args: LlmArgs) -> Found:
    """Upstream takes one of the two."""
    both = bool(_schedule(args)) and args.speculative_config.max_concurrency is not None
    return Found(
        not both,
        f"{'both' if both else 'not both'} of draft_len_schedule and max_concurrency are given",
        f"Leave out {CONFIG}.max_concurrency: a schedule that ends does the same",
    )


def schedule_on_one_rank(case: Case, args: LlmArgs) -> Found:
    """With attention-DP each rank goes by its own batch, and graphs are for one length of each."""
    alone = bool(args.enable_attention_dp) and args.tensor_parallel_size > 1
    return Found(
        not alone or not _schedule(args),
        f"enable_attention_dp is {str(alone).lower()}, draft_len_schedule is "
        f"{_schedule(args) or 'not given'}",
        f"Leave out {CONFIG}.draft_len_schedule",
    )


def acceptance_threshold(case: Case, args: LlmArgs) -> Found:
    """A bad spell, one long text in another language, and speculation is off until a restart."""
    threshold = args.speculative_config.acceptance_rate_threshold
    return Found(
        not threshold,
        f"acceptance_rate_threshold is {threshold}"
        + ("; below it upstream ends speculation for good" if threshold else ""),
        f"Leave out {CONFIG}.acceptance_rate_threshold and .acceptance_rate_window_size, and watch "
        "the metrics instead",
    )


def forced_acceptance(case: Case, args: LlmArgs) -> Found:
    """The texts are wrong: a developers' variable accepts drafts whatever the target says."""
    name = "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS"
    forced = name in (args.env_overrides or {})
    return Found(
        not forced, f"{name} is {'' if forced else 'not '}set", "Remove it from env_overrides"
    )


def _schedule(args: LlmArgs) -> dict[int, int]:
    return args.speculative_config.draft_len_schedule or {}


def _list(taps: Sequence[int] | None) -> str:
    return ", ".join(map(str, taps)) if taps else "not given"

"""Which checks there are, and how bad it is when one fails."""

from collections.abc import Callable, Iterator
from typing import TypeVar

from dflash_trt.checkpoints import TENSORRT_LLM_CHECKS
from dflash_trt.checkpoints.checks import Finding, Found, NotKnown, Severity
from dflash_trt.tensorrt_llm.case import Case
from dflash_trt.tensorrt_llm.checks import arguments, drafting, machine, memory, serving, values
from dflash_trt.tensorrt_llm.chosen import LlmArgs

Look = Callable[[Case, LlmArgs], Found]
Part = TypeVar("Part")


def _of(part: Callable[[Case], Part], look: Callable[[Part], Found]) -> Look:
    """A check of a part of the case only."""

    def of_case(case: Case, args: LlmArgs) -> Found:
        return look(part(case))

    of_case.__name__, of_case.__doc__ = look.__name__, look.__doc__
    return of_case


# error: does not start, or never drafts well; warning: slow, or worse than it could be;
# note: what a user of the server may meet
CHECKS: tuple[tuple[Look, Severity], ...] = (
    *((_of(lambda case: case, look), "error") for look in arguments.ARGUMENT_CHECKS),
    *((_of(lambda case: case.pair, check.look), check.severity) for check in TENSORRT_LLM_CHECKS),
    (values.values_that_work, "error"),
    (values.keys_of_sections, "error"),
    (drafting.generation_of_version, "error"),
    (drafting.windows_of_version, "warning"),
    (drafting.draft_length, "error"),
    (drafting.draft_length_as_trained, "warning"),
    (drafting.taps_as_stated, "error"),
    (drafting.mask_as_stated, "error"),
    (drafting.drafter_is_local, "error"),
    (drafting.schedule_starts_full, "error"),
    (drafting.schedule_within_length, "error"),
    (drafting.schedule_or_concurrency, "error"),
    (drafting.schedule_covers_batch, "warning"),
    (drafting.schedule_on_one_rank, "warning"),
    (drafting.acceptance_threshold, "warning"),
    (drafting.forced_acceptance, "error"),
    (memory.weights_fit, "error"),
    (memory.dense_context, "error"),
    (memory.memory_fraction, "warning"),
    (memory.concurrency_met, "warning"),
    (memory.tokens_of_a_step, "error"),
    (memory.long_prompts, "warning"),
    (memory.sequence_length_stated, "warning"),
    (memory.target_positions, "error"),
    (memory.drafter_positions, "warning"),
    (memory.block_reuse, "warning"),
    (memory.recomputed_tail, "warning"),
    (memory.cache_type_of_pool, "warning"),
    (machine.no_pipeline, "error"),
    (machine.no_context_parallel, "error"),
    (machine.ranks_on_machine, "error"),
    (machine.no_idle_gpus, "warning"),
    (machine.nvlink_domain, "warning"),
    (machine.heads_divide, "error"),
    (machine.vocabulary_divides, "note"),
    (machine.experts_divide, "error"),
    (machine.attention_data_parallel, "warning"),
    (machine.drafter_attention, "error"),
    (machine.drafter_windows, "error"),
    (machine.drafter_attention_paged, "warning"),
    (machine.paged_attention_shapes, "error"),
    (machine.flash_attention_wheel, "note"),
    (machine.target_attention, "warning"),
    (machine.expert_kernels, "error"),
    (machine.expert_kernels_fast, "warning"),
    (machine.cache_type, "error"),
    (serving.graphs_on, "warning"),
    (serving.graphs_padded, "warning"),
    (serving.graph_sizes_agree, "error"),
    (serving.graphs_cover_batch, "warning"),
    (serving.overlap, "warning"),
    (serving.rejection_with_guided, "error"),
    (serving.sampled_requests, "note"),
    (serving.penalties, "note"),
    (serving.logits_processors, "error"),
    (serving.lora, "warning"),
    (serving.scheduler_policy, "warning"),
    (serving.one_server, "warning"),
    (serving.real_weights, "error"),
    (serving.no_remote_code, "warning"),
    (serving.acceptance_metrics, "warning"),
    (serving.acceptance_per_request, "note"),
    (serving.accuracy_of_release, "warning"),
    (serving.hub_target, "error"),
    (serving.target_as_checked, "error"),
    (serving.deprecated_arguments, "warning"),
    (serving.unstable_arguments, "note"),
)


def findings(case: Case, args: LlmArgs) -> Iterator[Finding]:
    """Every check's, in the table's order."""
    for look, severity in CHECKS:
        try:
            found = look(case, args)
        except NotKnown as missing:
            yield Finding(name(look), "not checked", str(missing))
            continue
        if found.ok:
            yield Finding(name(look), "passed", found.what)
        else:
            yield Finding(name(look), severity, found.what, found.fix)


def name(look: Look) -> str:
    return look.__name__.replace("_", "-")

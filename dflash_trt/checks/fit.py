"""Whether a drafter belongs to a target, and which engine kinds support the two."""

from collections.abc import Iterator, Sequence
from typing import Any

from dflash_trt.checkpoints.model import NO_DRAFTER, Drafter, Pair, Target
from dflash_trt.checks.eagle3 import EAGLE3_CHECKS
from dflash_trt.checks.findings import Check, Finding, checks_for, run, warnings_of
from dflash_trt.checks.pair import PAIR_CHECKS
from dflash_trt.checks.target import TARGET_CHECKS
from dflash_trt.checks.tensorrt_llm import TENSORRT_LLM_CHECKS
from dflash_trt.engine_kinds import KINDS, EngineKind
from dflash_trt.errors import CheckpointError, PairError
from dflash_trt.weights.weights import open_files

# checks of limits of our own reader
READER_CHECKS = ("target-tensors", "drafter-tensors")
RECURRENT = (
    "its recurrent layers verify chains of drafts: a tree would need a state for each branch"
)


def check_pair(
    target: Target,
    drafter: Drafter | None,
    draft_tokens: int | None,
    max_seq_len: int | None = None,
    other_checks: Sequence[Check[[Pair]]] = (),
) -> list[Finding]:
    """Return warnings, of a target alone too; PairError or CheckpointError if it cannot run."""
    pair = Pair(target, drafter or NO_DRAFTER, draft_tokens, max_seq_len)
    return warnings_of((check(pair) for check in _checks(pair, other_checks)), PairError)


def pair_findings(pair: Pair, other_checks: Sequence[Check[[Pair]]] = ()) -> Iterator[Finding]:
    return run(_checks(pair, other_checks), pair)


def _checks(pair: Pair, other_checks: Sequence[Check[[Pair]]]) -> list[Check[[Pair]]]:
    if pair.drafter.absent:
        return [*TARGET_CHECKS, *other_checks]
    if pair.method == "eagle3":
        return [*TARGET_CHECKS, *EAGLE3_CHECKS, *other_checks]
    return [*TARGET_CHECKS, *PAIR_CHECKS, *other_checks]


def engine_kinds(pair: Pair, own_findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Return for each kind `kind`, `fits`, `reasons` against it, and `notes`."""
    models = (pair.target, pair.drafter)
    graphs = [f"{model.role}: {model.refusal.problem}" for model in models if model.refusal]
    upstream = []
    for finding in own_findings:
        if finding.result != "error":
            continue
        reason = f"{finding.name}: {finding.found}"
        graphs.append(reason)
        if finding.name not in READER_CHECKS:  # it reads tensors itself
            upstream.append(reason)
    for model in models:
        if model.refusal and any(model.directory.glob("*.safetensors")):
            try:  # a bundle takes any complete file
                open_files(model.directory)
            except CheckpointError as error:
                upstream.append(f"{model.role}: {error.problem}")
    for finding in run(checks_for(TENSORRT_LLM_CHECKS, pair.method), pair):
        if finding.result == "error":
            upstream.append(finding.found)
    is_hybrid = pair.target.read is not None and bool(pair.target.spec.delta_nets)
    return [
        _fit_of(kind, upstream if kind.graphs is None else graphs, is_hybrid)
        for kind in KINDS.values()
    ]


def _fit_of(kind: EngineKind, reasons: Sequence[str], is_hybrid: bool) -> dict[str, Any]:
    notes = list(kind.notes)
    reasons = list(reasons)
    if is_hybrid and kind.graphs is not None:
        if kind.graphs.why_no_recurrence is not None:
            reasons.append(f"target: {kind.graphs.why_no_recurrence}")
        else:
            notes.append(RECURRENT)
    return {"kind": kind.name, "fits": not reasons, "reasons": reasons, "notes": notes}

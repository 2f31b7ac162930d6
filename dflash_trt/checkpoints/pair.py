"""Does this drafter belong to this target, and which engine kinds take the two?"""

from collections.abc import Iterator, Sequence
from typing import Any

from dflash_trt.checkpoints import model_checks, training_checks, upstream_checks
from dflash_trt.checkpoints.checks import Check, Finding, checks_for, checks_of, run
from dflash_trt.checkpoints.drafter import Drafter
from dflash_trt.checkpoints.summary import NO_DRAFTER, ModelSummary, Pair, config_values
from dflash_trt.checkpoints.target import Target
from dflash_trt.errors import PairError

TARGET_CHECKS: list[Check[[Pair]]] = model_checks.OF_THE_TARGET
PAIR_CHECKS: list[Check[[Pair]]] = checks_of(model_checks, training_checks)
EAGLE3_CHECKS: list[Check[[Pair]]] = [*TARGET_CHECKS, *upstream_checks.OF_EAGLE3]
# what TensorRT-LLM's workers take: an error stands against the pair, a note does not
TENSORRT_LLM_CHECKS: list[Check[[Pair]]] = [
    check for check in checks_of(upstream_checks) if check not in upstream_checks.OF_EAGLE3
]
# checks of what only our own reader refuses
READER_CHECKS = ("target-tensors", "drafter-tensors")
MIN_HEAD_DIM = 16  # TensorRT has no kernel for 8


def check_pair(
    target: Target,
    drafter: Drafter | None,
    draft_tokens: int | None,
    max_seq_len: int | None = None,
) -> list[Finding]:
    """The warnings of a pair that can run, or of a target alone.

    draft_tokens, max_seq_len: what the build config fixes, or None.
    Raises PairError for a wrong pair, CheckpointError for a missing tensor or a broken tokenizer.
    """
    at, checks = target.directory, TARGET_CHECKS
    other: ModelSummary[Any] = NO_DRAFTER
    if drafter is not None:
        checks = PAIR_CHECKS
        values = config_values(drafter.directory, "drafter")
        other = ModelSummary("drafter", drafter.directory, values, model=drafter)
    summary = ModelSummary("target", at, config_values(at, "target"), model=target)
    pair = Pair(summary, other, draft_tokens, max_seq_len)
    warnings = []
    for check in checks:
        finding = check(pair)
        if finding.result == "error":
            raise PairError(finding.found, finding.fix)
        if finding.result == "warning":
            warnings.append(finding)
    return warnings


def pair_findings(pair: Pair) -> Iterator[Finding]:
    """Every check's, in order; without a drafter those of the target."""
    checks = EAGLE3_CHECKS if pair.method == "eagle3" else PAIR_CHECKS
    return run(TARGET_CHECKS if pair.drafter.absent else checks, pair)


def engine_kinds(pair: Pair, findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Of each kind: `kind`, `state` ("built"), `fits`, `reasons` against it, and `notes`.

    findings: of the pair's own checks.
    """
    models = (pair.target, pair.drafter)
    refused = [f"{m.role}: {m.refusal.problem}" for m in models if m.refusal]
    wrong = [each for each in findings if each.result == "error"]
    graphs = refused + [f"{each.name}: {each.found}" for each in wrong]
    heads = [(m.role, m.model.spec.layers[0].head_dim) for m in models if m.model]
    small = [
        f"{role}: head_dim {size} is below {MIN_HEAD_DIM}"
        for role, size in heads
        if size < MIN_HEAD_DIM
    ]
    # it reads tensors itself
    upstream = [f"{each.name}: {each.found}" for each in wrong if each.name not in READER_CHECKS]
    found = list(run(checks_for(TENSORRT_LLM_CHECKS, pair.method), pair))
    upstream += [each.found for each in found if each.result == "error"]
    notes = [each.found for each in found if each.result == "note"]
    return [
        _kind("onnxruntime", graphs, []),
        _kind("tensorrt", graphs + small, ["its plans were built and checked, never run"]),
        _kind("tensorrt_llm", upstream, notes),
    ]


def _kind(kind: str, reasons: list[str], notes: list[str]) -> dict[str, Any]:
    return {"kind": kind, "state": "built", "fits": not reasons, "reasons": reasons, "notes": notes}

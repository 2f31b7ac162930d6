"""Which engine kinds a target and a drafter fit, and why not."""

from collections.abc import Sequence
from typing import Any

from dflash_trt.checkpoints.checks import tensorrt_llm
from dflash_trt.checkpoints.outline import NotKnown, Pair
from dflash_trt.checkpoints.pair import Finding

LEAST_HEAD_DIM = 16  # TensorRT has no kernel for 8
OURS = ("target-tensors", "drafter-tensors")  # checks of what our own reader takes
# each with whether it stands against the pair
TENSORRT_LLM = (
    (tensorrt_llm.hidden_states_captured, True),
    (tensorrt_llm.target_layout, True),
    (tensorrt_llm.drafter_layout, True),
    (tensorrt_llm.drafter_method, True),
    (tensorrt_llm.grouped_drafter_attention, True),
    (tensorrt_llm.uniform_drafter_layers, True),
    (tensorrt_llm.taps_ascending, True),
    (tensorrt_llm.listed_upstream, False),
    (tensorrt_llm.first_generation, False),
)


def engine_kinds(pair: Pair, checks: Sequence[Finding]) -> list[dict[str, Any]]:
    """Of each kind: `kind`, `state` ("built" or "planned"), `fits`, `reasons` and `notes`.

    `fits` of a planned kind says that nothing known stands against it.
    """
    models = (pair.target, pair.drafter)
    refused = [f"{m.role}: {m.refusal.problem}" for m in models if m.refusal]
    wrong = [f"{check.name}: {check.found}" for check in checks if check.result == "error"]
    graphs = refused + wrong
    small = [
        f"{m.role}: head_dim {layer.head_dim} is below {LEAST_HEAD_DIM}"
        for m in models
        if m.model
        for layer in m.model.spec.layers[:1]
        if layer.head_dim < LEAST_HEAD_DIM
    ]
    reasons, notes = _tensorrt_llm(pair)
    # it reads tensors itself: what only our reader refuses does not count
    wrong = [each for each in wrong if not each.startswith(OURS)]
    return [
        _kind("onnxruntime", "built", graphs, []),
        _kind("tensorrt", "built", graphs + small, ["its plans were built and checked, never run"]),
        _kind("tensorrt_llm", "built", wrong + reasons, notes),
    ]


def _kind(kind: str, state: str, reasons: list[str], notes: list[str]) -> dict[str, Any]:
    return {"kind": kind, "state": state, "fits": not reasons, "reasons": reasons, "notes": notes}


def _tensorrt_llm(pair: Pair) -> tuple[list[str], list[str]]:
    """What stands against its DFlash worker, and what else to know."""
    reasons: list[str] = []
    notes: list[str] = []
    for look, against in TENSORRT_LLM:
        try:
            found = look(pair)
        except NotKnown:
            continue
        if not found.ok:
            (reasons if against else notes).append(found.what)
    return reasons, notes

"""Which engine kinds a target and a drafter fit, and why not."""

from collections.abc import Sequence
from typing import Any

from dflash_trt.checkpoints.drafter import Drafter
from dflash_trt.checkpoints.outline import Outline, Pair
from dflash_trt.checkpoints.pair import Finding
from dflash_trt.checkpoints.target import Target

LEAST_HEAD_DIM = 16  # TensorRT has no kernel for 8
# TensorRT-LLM hands out hidden states of these (1.4.0rc1); its own table lists gpt-oss only
TAPPED = ("GptOss", "Llama", "Qwen3For", "Qwen3_5", "Kimi", "Laguna", "MiniMaxM2")
LISTED = "GptOssForCausalLM"


def engine_kinds(pair: Pair, checks: Sequence[Finding]) -> list[dict[str, Any]]:
    """Of each kind: `kind`, `state` ("built" or "planned"), `fits`, `reasons` and `notes`.

    `fits` of a planned kind says that nothing known stands against it; it has not been run.
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
    reasons, notes = _tensorrt_llm(pair.target, pair.drafter)
    # it reads tensors itself: what only our reader refuses does not count
    wrong = [each for each in wrong if not each.startswith(("target-tensors", "drafter-tensors"))]
    return [
        _kind("onnxruntime", "built", graphs, []),
        _kind("tensorrt", "planned", graphs + small, ["runs the same graphs"]),
        _kind("tensorrt_llm", "planned", wrong + reasons, notes),
    ]


def _kind(kind: str, state: str, reasons: list[str], notes: list[str]) -> dict[str, Any]:
    return {"kind": kind, "state": state, "fits": not reasons, "reasons": reasons, "notes": notes}


def _tensorrt_llm(
    target: Outline[Target], drafter: Outline[Drafter]
) -> tuple[list[str], list[str]]:
    """What its DFlash worker does not take, as of 1.4.0rc1."""
    reasons, notes = [], []
    found = target.values.get("architectures")
    architecture = str(found[0]) if isinstance(found, list) and found else "unknown"
    if not architecture.startswith(TAPPED) or "Moe" in architecture.removeprefix("Qwen3_5"):
        reasons.append(f"target: TensorRT-LLM hands out no hidden states of {architecture}")
    elif architecture != LISTED:
        notes.append(f"TensorRT-LLM's table lists DFlash for {LISTED} only")
    values = drafter.values
    if "speculators_model_type" in values:
        reasons.append("drafter: TensorRT-LLM reads z-lab's layout, not the speculators format")
    if "DFlash2DraftModel" in str(values.get("architectures")):
        notes.append("DFlash2 needs a TensorRT-LLM newer than 1.4.0rc1")
    if values.get("projector_type") == "dspark":
        notes.append("DSpark drafters need decoding_type DSpark")
    if drafter.model and len({(x.num_key_value_heads, x.head_dim) for x in drafter.layers}) > 1:
        reasons.append("drafter: its layers differ in kv heads or head_dim")
    return reasons, notes

"""Checks of what TensorRT-LLM's workers require in any configuration (1.4.0rc1)."""

from dflash_trt.checkpoints.drafter import (
    FROM_ANCHOR,
    drafter_format,
    is_eagle3,
    other_method,
)
from dflash_trt.checkpoints.model import Pair
from dflash_trt.checks.findings import Check, Found, check
from dflash_trt.checks.pair import joined
from dflash_trt.weights.gguf import LINK

# targets whose layers call `maybe_capture_hidden_states` (`tensorrt_llm/_torch/models/modeling_*`)
TAPPED = (
    "GptOssFor", "Kimi", "Laguna", "Llama", "MiniMaxM2", "Mistral", "Qwen3For", "Qwen3MoeFor",
    "Qwen3NextFor", "Qwen3_5",
)  # fmt: skip
# fields of DSpark heads
DSPARK = ("shift_label", "use_confidence_head", "enable_confidence_head", "markov_rank")
# methods that it has since 1.4.0rc1, and dflash-trt does not build
UNBUILT = {
    "LiLiCorr": "TensorRT-LLM drafts with LiLiCorr (pull request 19856), but no drafter's "
    "config.json was public to check one by (November 2026)"
}


@check("error", "dflash", "eagle3")
def hidden_states_captured(pair: Pair) -> Found:
    """Check that TensorRT-LLM captures hidden states of this target, which the drafter needs."""
    name = pair.target.architecture
    is_tapped = name.startswith(TAPPED)
    states = "the hidden states" if is_tapped else "no hidden states"
    return Found(
        is_tapped,
        f"TensorRT-LLM hands out {states} of {name}",
        "Take another engine kind, or a target of another family",
    )


@check("error")
def target_layout(pair: Pair) -> Found:
    """Check the target's format: the PyTorch backend loads what transformers saves."""
    is_gguf = (pair.target.directory / LINK).is_file()
    form = "GGUF" if is_gguf else "safetensors"
    what = f"the target is in {form}; TensorRT-LLM reads safetensors"
    return Found(not is_gguf, what, "Take the model's safetensors")


@check("error", "dflash", "eagle3")
def drafter_layout(pair: Pair) -> Found:
    """Check the drafter's layout: others have other names, or tables of their own."""
    form = drafter_format(pair.drafter)
    layout = "its own layout" if form == "z-lab" else f"the {form} format"
    if form == "z-lab" and any(pair.drafter.values.get(name) for name in FROM_ANCHOR):
        what = "the drafter drafts from the anchor's place; TensorRT-LLM reads masks alone"
        return Found(False, what, "Use a drafter of which only the masks draft")
    required = "z-lab's"
    fix = "Use the drafter in z-lab's layout"
    if pair.method == "eagle3":
        required = "that of EAGLE-3's authors"
        fix = "Use a head in the layout of EAGLE-3's authors"
    what = f"the drafter is in {layout}; TensorRT-LLM reads {required}"
    return Found(form == "z-lab", what, fix)


@check("error", "dflash", "eagle3")
def drafter_method(pair: Pair) -> Found:
    """Check that the drafter is of the configured method; upstream stops at DSpark heads."""
    values = pair.drafter.values
    heads = [name for name in DSPARK if values.get(name)]
    other = f"DSpark ({', '.join(heads)})" if heads else other_method(values)
    method = "dflash"
    name = "DFlash"
    if is_eagle3(values):
        method = "eagle3"
        name = "an EAGLE-3 head"
    elif other:
        method = ""
    what = f"the drafter is {other or name}, speculation.method {pair.method}"
    if other in UNBUILT:
        what += f". {UNBUILT[other]}"
    fix = f"Set speculation.method: {method}" if method else "Use a DFlash drafter"
    return Found(method == pair.method, what, fix)


@check("error", "dflash")
def taps_ascending(pair: Pair) -> Found:
    """Check that taps ascend: layers are captured in that order, others would be scrambled."""
    taps = pair.drafter.taps  # sorted upstream (`DFlashSpecMetadata`, dflash.py@00679c66)
    return Found(
        list(taps) == sorted(taps),
        f"the drafter's taps are {joined(taps)}; TensorRT-LLM captures layers in ascending order",
        "Take another engine kind, or a drafter whose taps ascend",
    )


TENSORRT_LLM_CHECKS: list[Check[[Pair]]] = [
    hidden_states_captured,
    target_layout,
    drafter_layout,
    drafter_method,
    taps_ascending,
]

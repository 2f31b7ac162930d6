"""Checks of what TensorRT-LLM's workers require in any configuration (1.4.0rc1)."""

from dflash_trt.checkpoints.drafter import (
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
ZLABS = "Use the drafter in z-lab's layout"
# methods that it has since 1.4.0rc1, and dflash-trt does not build
UNBUILT = {
    "LiLiCorr": "TensorRT-LLM drafts with LiLiCorr (pull request 19856), but no drafter's "
    "config.json was public to check one by (November 2026)"
}


@check("error", "dflash", "eagle3")
def hidden_states_captured(pair: Pair) -> Found:
    """Check that TensorRT-LLM captures hidden states of this target, which the drafter needs."""
    name = pair.target.architecture
    tapped = name.startswith(TAPPED)
    return Found(
        tapped,
        f"TensorRT-LLM hands out {'the' if tapped else 'no'} hidden states of {name}",
        "Take another engine kind, or a target of another family",
    )


@check("error")
def target_layout(pair: Pair) -> Found:
    """Check the target's format: the PyTorch backend loads what transformers saves."""
    gguf = (pair.target.directory / LINK).is_file()
    return Found(
        not gguf,
        f"the target is in {'GGUF' if gguf else 'safetensors'}; TensorRT-LLM reads safetensors",
        "Take the model's safetensors",
    )


@check("error", "dflash", "eagle3")
def drafter_layout(pair: Pair) -> Found:
    """Check the drafter's layout: others have other names, or tables of their own."""
    form, head = drafter_format(pair.drafter.values), pair.method == "eagle3"
    whose = "that of EAGLE-3's authors" if head else "z-lab's"
    return Found(
        form == "z-lab",
        f"the drafter is in {'its own layout' if form == 'z-lab' else f'the {form} format'}; "
        f"TensorRT-LLM reads {whose}",
        "Use a head in the layout of EAGLE-3's authors" if head else ZLABS,
    )


@check("error", "dflash", "eagle3")
def drafter_method(pair: Pair) -> Found:
    """Check that the drafter is of the configured method; upstream stops at DSpark heads."""
    values = pair.drafter.values
    heads = [
        name
        for name in ("shift_label", "use_confidence_head", "enable_confidence_head", "markov_rank")
        if values.get(name)
    ]
    other = f"DSpark ({', '.join(heads)})" if heads else other_method(values)
    found = "eagle3" if is_eagle3(values) else "" if other else "dflash"
    named = other or {"eagle3": "an EAGLE-3 head"}.get(found, "DFlash")
    what = f"the drafter is {named}, speculation.method {pair.method}"
    if other in UNBUILT:
        what += f". {UNBUILT[other]}"
    fix = f"Set speculation.method: {found}" if found else "Use a DFlash drafter"
    return Found(found == pair.method, what, fix)


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

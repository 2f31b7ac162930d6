"""Requirements of TensorRT-LLM's workers in any configuration, and checks of EAGLE-3 heads.

As of 1.4.0rc1 and the sources named below, in NVIDIA/TensorRT-LLM. A head's tensors and fields are
those of its authors (github.com/SafeAILab/EAGLE, `cnets.py`): one decoder layer (`midlayer`) over a
token's embedding and a state that `fc` makes from hidden states of three target layers; drafts have
`draft_vocab_size` tokens, which `d2t` maps to the target's.
"""

from typing import Any

from dflash_trt.checkpoints.drafter import drafter_format, is_eagle3, other_method
from dflash_trt.checkpoints.findings import Check, Found, NotKnown, check
from dflash_trt.checkpoints.gguf import LINK
from dflash_trt.checkpoints.model import OTHER_DRAFTER, Pair


@check("error")
def head_vocabulary(pair: Pair) -> Found:
    """Check the vocabulary: the head embeds the target's tokens."""
    own, target = pair.drafter.number("vocab_size"), pair.target.number("vocab_size")
    what = f"the head knows {own} tokens, the target {target}"
    return Found(own == target, what, OTHER_DRAFTER)


@check("error")
def head_tokens(pair: Pair) -> Found:
    """Check for d2t: without it drafts are read as the target's first tokens."""
    size = pair.drafter.values.get("draft_vocab_size")
    fewer = isinstance(size, int) and size < pair.target.number("vocab_size")
    if fewer and pair.drafter.stored is None:
        raise NotKnown("the head's tensors cannot be read here")
    mapped = pair.drafter.stored is not None and "d2t" in pair.drafter.stored.names
    what = f"the head drafts {size or 'all'} tokens, d2t is {'' if mapped else 'not '}there"
    return Found(mapped or not fewer, what, "Use the head as it was published, d2t included")


OF_EAGLE3: list[Check[Any]] = [head_vocabulary, head_tokens]

# targets whose layers call `maybe_capture_hidden_states` (`tensorrt_llm/_torch/models/modeling_*`)
TAPPED = (
    "GptOssFor", "Kimi", "Laguna", "Llama", "MiniMaxM2", "Mistral", "Qwen3For", "Qwen3MoeFor",
    "Qwen3NextFor", "Qwen3_5",
)  # fmt: skip
ZLABS = "Use the drafter in z-lab's layout"


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
    fix = f"Set speculation.method: {found}" if found else "Use a DFlash drafter"
    return Found(
        found == pair.method, f"the drafter is {named}, speculation.method {pair.method}", fix
    )


@check("error", "dflash")
def taps_ascending(pair: Pair) -> Found:
    """Check that taps ascend: layers are captured in that order, others would be scrambled.

    `DFlashSpecMetadata.__post_init__` sorts them (`_torch/speculative/dflash.py@00679c66`).
    """
    taps = pair.drafter.taps
    return Found(
        list(taps) == sorted(taps),
        f"the drafter's taps are {', '.join(map(str, taps))}; TensorRT-LLM captures layers in "
        "ascending order",
        "Take another engine kind, or a drafter whose taps ascend",
    )

"""Drafters in z-lab's layout, NVIDIA ModelOpt's exports too: no embedding, no head, no prefix."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dflash_trt.checkpoints import dflash2
from dflash_trt.checkpoints.fields import decoder_fields, flag, number, real, refuse, section
from dflash_trt.checkpoints.spec import DrafterSpec, LayerSpec
from dflash_trt.errors import CheckpointError

# fields that change what a drafter computes, with the values that leave it as it is
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_swa_attention_sink_bias": (False,),
    "attention_value_scale": (1.0,),
    "logit_scale": (1.0,),
    "shift_label": (False,),
    "selector_rank": (),
    "conv_kernel_size": (),
}


def zlab(file: Path, config: dict[str, Any]) -> DrafterSpec:
    """The spec of a drafter from its config.json.

    As in z-lab's code a DFlash value is looked up in `dflash_config` first, then at top level.
    `causal`, `use_swa`, `swa_window_size` and `attention_sink_bias` are ModelOpt's, as vLLM reads
    them.
    """
    values = config | section(file, config, "dflash_config")
    second = dflash2.ARCHITECTURE in config["architectures"]
    for name, neutral in NEUTRAL.items():
        handled = second and name in dflash2.FIELDS
        if not handled and values.get(name) is not None and values[name] not in neutral:
            raise refuse(file, f"{name} is {values[name]!r}")
    for other, name in (("draft_vocab_size", "vocab_size"), ("target_hidden_size", "hidden_size")):
        if values.get(other) not in (None, config.get(name)):
            raise refuse(file, f"the drafter's {name} and the target's differ ({other})")
    if values.get("mask_token_id") is None:
        raise CheckpointError(
            f"{file} has no mask_token_id",
            "Add it to dflash_config: the token id that the drafter was trained with as mask",
        )
    num_target_layers = number(file, config, "num_target_layers")
    fields = decoder_fields(file, config)
    fields["layers"] = _layers(file, values, fields["layers"])
    if second:
        convolution = dflash2.read_convolution(file, values)
        fields["layers"] = tuple(replace(x, convolution=convolution) for x in fields["layers"])
    cap = values.get("final_logit_softcapping")
    return DrafterSpec(
        **fields,
        qk_norm=True,
        block_size=number(file, values, "block_size", 16),
        mask_token_id=number(file, values, "mask_token_id", least=0),
        target_layer_ids=_taps(file, values, num_target_layers),
        num_target_layers=num_target_layers,
        embedding_scale=real(file, values, "input_embedding_scale", 1.0),
        output_multiplier=real(file, values, "output_multiplier", 1.0),
        final_logit_softcapping=real(file, values, "final_logit_softcapping") if cap else None,
        sinks="attention_sink_bias" if flag(file, values, "attention_sink_bias") else None,
        selector=dflash2.read_selector(file, values) if second else None,
    )


def check_windows(file: Path, config: dict[str, Any], layers: Sequence[LayerSpec]) -> None:
    """Without use_sliding_window transformers' Qwen3Config takes the windows away, silently."""
    if any(layer.window for layer in layers) and not flag(file, config, "use_sliding_window"):
        raise CheckpointError(
            f"{file}: layer_types has sliding layers, but use_sliding_window is not true, so that "
            "their window counts for nothing in the code the drafter was trained with",
            "Set use_sliding_window to true if it was trained with windows, else make the layers "
            "full_attention and set is_causal to what it was trained with",
        )


def _layers(
    file: Path, values: dict[str, Any], layers: tuple[LayerSpec, ...]
) -> tuple[LayerSpec, ...]:
    """Layers with a window are causal in the block unless a field rules for all (z-lab, vLLM)."""
    check_windows(file, values, layers)
    causal = flag(file, values, "is_causal", flag(file, values, "causal", None))
    layers = tuple(
        replace(layer, causal=layer.window is not None if causal is None else causal)
        for layer in layers
    )
    if flag(file, values, "use_swa"):
        sizes = {"swa_window_size": values.get("sliding_window")} | values
        window = number(file, sizes, "swa_window_size")
        layers = tuple(replace(layer, window=window) for layer in layers)
    return layers


def _taps(file: Path, values: dict[str, Any], num_target_layers: int) -> tuple[int, ...]:
    """target_layer_ids, or z-lab's default."""
    if values.get("target_layer_ids") is not None:
        return layer_numbers(file, values, "target_layer_ids")
    return default_taps(num_target_layers, number(file, values, "num_hidden_layers"))


def default_taps(layers: int, count: int) -> tuple[int, ...]:
    """z-lab's `build_target_layer_ids`: from the target's second layer to the third-last."""
    if count == 1:
        return (layers // 2,)
    return tuple(round(1 + i * (layers - 4) / (count - 1)) for i in range(count))


def layer_numbers(file: Path, values: dict[str, Any], name: str) -> tuple[int, ...]:
    """A list of layer numbers in config.json."""
    found = values.get(name)
    if not isinstance(found, list) or not found or not all(type(i) is int for i in found):
        raise CheckpointError(
            f"{file}: {name} is {found!r}, not a list of layer numbers", "Export the drafter again"
        )
    return tuple(found)

"""Drafters in z-lab's layout, NVIDIA ModelOpt's exports too: no embedding, no head, no prefix."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dflash_trt.checkpoints import dflash2
from dflash_trt.checkpoints.fields import Config, decoder_fields
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


def zlab(config: Config) -> DrafterSpec:
    """The spec of a drafter from its config.json.

    As in z-lab's code a DFlash value is looked up in `dflash_config` first, then at top level.
    `causal`, `use_swa`, `swa_window_size` and `attention_sink_bias` are ModelOpt's, as vLLM reads
    them.
    """
    values = config.under(config.section("dflash_config"))
    second = dflash2.ARCHITECTURE in config["architectures"]
    for name, neutral in NEUTRAL.items():
        handled = second and name in dflash2.FIELDS
        if not handled and values.get(name) is not None and values[name] not in neutral:
            raise config.refuse(f"{name} is {values[name]!r}")
    for other, name in (("draft_vocab_size", "vocab_size"), ("target_hidden_size", "hidden_size")):
        if values.get(other) not in (None, config.get(name)):
            raise config.refuse(f"the drafter's {name} and the target's differ ({other})")
    mask = mask_token(values, "Add it to dflash_config")
    num_target_layers = config.number("num_target_layers")
    fields = decoder_fields(config)
    fields["layers"] = _layers(values, fields["layers"])
    if second:
        convolution = dflash2.read_convolution(values)
        fields["layers"] = tuple(replace(x, convolution=convolution) for x in fields["layers"])
    if values.get("target_layer_ids") is not None:
        taps = layer_numbers(values, "target_layer_ids")
    else:
        taps = default_taps(num_target_layers, values.number("num_hidden_layers"))
    cap = values.get("final_logit_softcapping")
    return DrafterSpec(
        **fields,
        qk_norm=True,
        block_size=values.number("block_size", 16),
        mask_token_id=mask,
        target_layer_ids=taps,
        num_target_layers=num_target_layers,
        embedding_scale=values.real("input_embedding_scale", 1.0),
        output_multiplier=values.real("output_multiplier", 1.0),
        final_logit_softcapping=values.real("final_logit_softcapping") if cap else None,
        sinks="attention_sink_bias" if values.flag("attention_sink_bias") else None,
        selector=dflash2.read_selector(values, fields["vocab_size"]) if second else None,
    )


def mask_token(values: Config, add: str) -> int:
    if values.get("mask_token_id") is None:
        raise CheckpointError(
            f"{values.file} has no mask_token_id",
            f"{add}: the token id that the drafter was trained with as mask",
        )
    return values.number("mask_token_id", least=0)


def check_windows(config: Config, layers: Sequence[LayerSpec]) -> None:
    """Without use_sliding_window transformers' Qwen3Config takes the windows away, silently."""
    if any(layer.window for layer in layers) and not config.flag("use_sliding_window"):
        raise config.wrong(
            "layer_types has sliding layers, but use_sliding_window is not true, so that "
            "their window counts for nothing in the code the drafter was trained with",
            "Set use_sliding_window to true if it was trained with windows, else make the layers "
            "full_attention and set is_causal to what it was trained with",
        )


def _layers(values: Config, layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    """Layers with a window are causal in the block unless a field rules for all (z-lab, vLLM)."""
    check_windows(values, layers)
    causal = values.flag("is_causal", values.flag("causal", None))
    layers = tuple(
        replace(layer, causal=layer.window is not None if causal is None else causal)
        for layer in layers
    )
    if values.flag("use_swa"):
        sizes = values.over({"swa_window_size": values.get("sliding_window")})
        window = sizes.number("swa_window_size")
        layers = tuple(replace(layer, window=window) for layer in layers)
    return layers


def default_taps(layers: int, count: int) -> tuple[int, ...]:
    """z-lab's `build_target_layer_ids`: from the target's second layer to the third-last."""
    if count == 1:
        return (layers // 2,)
    return tuple(round(1 + i * (layers - 4) / (count - 1)) for i in range(count))


def layer_numbers(values: Config, name: str) -> tuple[int, ...]:
    """A list of layer numbers in config.json."""
    found = values.get(name)
    if not isinstance(found, list) or not found or not all(type(i) is int for i in found):
        raise values.wrong(
            f"{name} is {found!r}, not a list of layer numbers", "Export the drafter again"
        )
    return tuple(found)

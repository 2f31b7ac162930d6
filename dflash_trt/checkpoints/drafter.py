"""The drafter: a DFlash checkpoint in z-lab's layout (no embedding, no head, no prefix)."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflash_trt.checkpoints import dflash2
from dflash_trt.checkpoints.fields import decoder_fields, number, refuse
from dflash_trt.checkpoints.files import check_directory, read_json
from dflash_trt.checkpoints.spec import DrafterSpec, LayerSpec, Shapes, layer_shapes
from dflash_trt.checkpoints.weights import Weights
from dflash_trt.errors import CheckpointError

# fields that change what the drafter computes, with the values that leave it as it is
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "causal": (False,),
    "use_swa": (False,),
    "attention_sink_bias": (False,),
    "attention_value_scale": (1.0,),
    "input_embedding_scale": (1.0,),
    "output_multiplier": (1.0,),
    "final_logit_softcapping": (0, 0.0),
    "projector_type": (),
    "selector_rank": (),
    "conv_kernel_size": (),
    "draft_vocab_size": (),
}


@dataclass(frozen=True)
class Drafter:
    directory: Path
    spec: DrafterSpec
    weights: Weights


def load_drafter(directory: Path) -> Drafter:
    """Read a drafter directory: config.json and weight headers.

    As in z-lab's code a DFlash value is looked up in `dflash_config` first, then at top level.
    Raises CheckpointError when a file is missing or broken or the drafter is not handled.
    """
    check_directory(directory, "drafter")
    file = directory / "config.json"
    config = read_json(file)
    if "speculators_model_type" in config:
        raise refuse(file, "the drafter is in the speculators format")
    architectures = config.get("architectures") or ()
    second = dflash2.ARCHITECTURE in architectures
    if not second and "DFlashDraftModel" not in architectures:
        raise refuse(file, f"the drafter's architecture is {config.get('architectures')}")
    own = config.get("dflash_config") or {}
    if not isinstance(own, dict):
        raise CheckpointError(f"{file}: dflash_config is not an object", "Export the drafter again")
    values = config | own
    for name, neutral in NEUTRAL.items():
        handled = second and name in dflash2.FIELDS
        if not handled and values.get(name) is not None and values[name] not in neutral:
            raise refuse(file, f"{name} is {values[name]!r}")
    if values.get("mask_token_id") is None:
        raise CheckpointError(
            f"{file} has no mask_token_id",
            "Add it to dflash_config: the token id that the drafter was trained with as mask",
        )
    num_target_layers = number(file, config, "num_target_layers")
    fields = decoder_fields(file, config)
    fields["layers"] = _with_causality(fields["layers"], values.get("is_causal"))
    if second:
        convolution = dflash2.read_convolution(file, values)
        fields["layers"] = tuple(replace(x, convolution=convolution) for x in fields["layers"])
    spec = DrafterSpec(
        **fields,
        qk_norm=True,
        block_size=number(file, values, "block_size", 16),
        mask_token_id=number(file, values, "mask_token_id", least=0),
        target_layer_ids=_taps(file, values, num_target_layers),
        num_target_layers=num_target_layers,
        selector=dflash2.read_selector(file, values) if second else None,
    )
    return Drafter(directory, spec, Weights(directory))


def _with_causality(layers: tuple[LayerSpec, ...], is_causal: bool | None) -> tuple[LayerSpec, ...]:
    """Layers with a window are causal in the block unless is_causal rules for all (z-lab)."""
    return tuple(
        replace(layer, causal=layer.window is not None if is_causal is None else bool(is_causal))
        for layer in layers
    )


def drafter_shapes(spec: DrafterSpec) -> Shapes:
    """Every tensor the drafter's graph reads from its own checkpoint."""
    hidden = spec.hidden_size
    shapes: Shapes = {
        "fc.weight": (hidden, len(spec.target_layer_ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i in range(spec.num_hidden_layers):
        shapes |= layer_shapes(spec, i)
    if spec.selector is not None:
        shapes |= dflash2.selector_shapes(spec.selector, hidden, spec.vocab_size)
    return shapes


def _taps(file: Path, values: dict[str, Any], num_target_layers: int) -> tuple[int, ...]:
    """target_layer_ids; absent: z-lab's default, spread from layer 1 to the third-last."""
    taps = values.get("target_layer_ids")
    if taps is None:
        count = number(file, values, "num_hidden_layers")
        if count == 1:
            return (num_target_layers // 2,)
        span = num_target_layers - 4
        return tuple(round(1 + i * span / (count - 1)) for i in range(count))
    if not isinstance(taps, list) or not taps or not all(isinstance(tap, int) for tap in taps):
        raise CheckpointError(
            f"{file}: target_layer_ids is {taps!r}, not a list of layer numbers",
            "Export the drafter again",
        )
    return tuple(taps)

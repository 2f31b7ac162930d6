"""Drafters in the `speculators` format (0.9.0): a nested transformer config, a vocabulary map."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from dflash_trt.checkpoints import dflash2
from dflash_trt.checkpoints.fields import SLIDING, Config, decoder_fields
from dflash_trt.checkpoints.spec import DrafterSpec, LayerSpec
from dflash_trt.checkpoints.weights import Weights
from dflash_trt.checkpoints.zlab import check_windows, layer_numbers, mask_token
from dflash_trt.errors import CheckpointError

DRAFTER_AGAIN = "Export the drafter again"
TRAINING_ONLY = ("t2d", "d2t", "verifier_norm.weight", "verifier_lm_head.weight")


def speculators(config: Config, names: Sequence[str]) -> DrafterSpec:
    """The spec of a drafter from its config.json (`DFlashSpeculatorConfig`, `DFlash2...`) and its
    tensor names.

    The tensors of the layers are named as z-lab's. Tap ids count the embedding as 0, so they are
    one more than z-lab's.
    """
    if not isinstance(config.get("transformer_layer_config"), dict):
        raise CheckpointError(f"{config.file} has no transformer_layer_config", DRAFTER_AGAIN)
    inner = config.section("transformer_layer_config")
    ropes = inner.get("rope_parameters")
    if isinstance(ropes, dict) and SLIDING in ropes:  # then it is every layer's
        inner = inner.under({"rope_parameters": ropes[SLIDING]})
    fields = decoder_fields(inner)
    check_windows(inner, fields["layers"])
    hidden, vocab = fields["hidden_size"], fields["vocab_size"]
    if config.number("target_hidden_size", hidden) != hidden:
        raise config.refuse("the drafter's hidden_size and the target's differ")
    draft_vocab = config.number("draft_vocab_size", 32000)
    second, selector = config["speculators_model_type"] == "dflash2", None
    causal = not config.flag("sliding_window_non_causal", second)
    fields["layers"] = tuple(_layer(layer, causal) for layer in fields["layers"])
    if second:
        values = inner.under(config)
        selector = dflash2.read_selector(values, draft_vocab)
        convolution = dflash2.read_convolution(values)
        fields["layers"] = tuple(replace(x, convolution=convolution) for x in fields["layers"])
    from_anchor = bool(config.flag("sample_from_anchor"))
    return DrafterSpec(
        **fields,
        qk_norm=True,
        block_size=config.number("block_size", 8) + from_anchor,
        mask_token_id=mask_token(config, "Add it"),
        target_layer_ids=tuple(
            tap - 1 for tap in layer_numbers(config, "aux_hidden_state_layer_ids")
        ),
        sample_from_anchor=from_anchor,
        own_tables=tuple(t for t in ("embed_tokens", "lm_head") if f"{t}.weight" in names),
        draft_vocab_size=None if draft_vocab == vocab else draft_vocab,
        selector=selector,
    )


def draft_token_ids(weights: Weights, spec: DrafterSpec) -> npt.NDArray[np.int64]:
    """Which of the target's tokens the rows of a reduced head are: int64 `[draft_vocab_size]`.

    Stored as d2t, the difference of the two ids. CheckpointError when they cannot be right.
    """
    stored = weights.read("d2t")
    ids: npt.NDArray[np.int64] = stored.astype(np.int64) + np.arange(len(stored))
    distinct = stored.dtype == np.int64 and len(np.unique(ids)) == len(ids)
    if not distinct or ids.min() < 0 or ids.max() >= spec.vocab_size:
        raise CheckpointError(
            f"d2t of {weights.directory} does not map its {len(ids)} tokens to as many of the "
            f"target's {spec.vocab_size}",
            DRAFTER_AGAIN,
        )
    return ids


def _layer(layer: LayerSpec, causal: bool) -> LayerSpec:
    """A window holds `sliding_window` tokens before the anchor, and never cuts the block."""
    if layer.window is None:
        return layer
    return replace(layer, window=layer.window + 1, window_from_anchor=True, causal=causal)

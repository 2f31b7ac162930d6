"""Drafters: DFlash in the layout of z-lab (ModelOpt too), speculators, DeepSpec or llama.cpp.

z-lab's have no embedding, head or prefix. Those of speculators (0.9.0) have a nested transformer
config and often a vocabulary map. DeepSpec's are z-lab's with an embedding and a head, and draft
from the anchor's row on. DFlash 2 adds convolutions around each layer's halves and a selector.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_trt.checkpoints.fields import SLIDING, Config, decoder_fields
from dflash_trt.checkpoints.model import Drafter, open_model, unless_refused
from dflash_trt.checkpoints.shapes import Shapes, layer_shapes
from dflash_trt.checkpoints.spec import (
    Convolution,
    DrafterSpec,
    LayerSpec,
    Selector,
)
from dflash_trt.errors import CheckpointError
from dflash_trt.weights.gguf import LINK
from dflash_trt.weights.weights import Weights

DFLASH2 = "DFlash2DraftModel"
ZLABS = ("DFlashDraftModel", DFLASH2)
DEEPSPEC = "Qwen3DSparkModel"  # DSpark, and with neither of its heads plain DFlash
# other methods' drafters, by part of their architecture, projector_type or speculators type
OTHERS = ("LiLiCorr", "DSpark", "Domino", "XPress", "PEagle", "EAGLE", "MTP")
TABLES = ("embed_tokens", "lm_head")
TRAINING_ONLY = ("t2d", "d2t", "verifier_norm.weight", "verifier_lm_head.weight")
MASK_EMBEDDING = "mask_embedding.pt"  # MiMo's
# Fields that change what is drafted and that nothing here reads, with their neutral values. They
# are of z-lab's code, speculators, vLLM (qwen3_dflash.py), SGLang (dflash_utils.py), llama.cpp.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_swa_attention_sink_bias": (False,),
    "attention_value_scale": (1.0,),
    "conv_kernel_conditioning": ("input",),
    "eagle_aux_hidden_state_layer_ids": (),
    "is_neox_style": (True,),
    "logit_scale": (1.0,),
    "shift_label": (False,),
    "use_aux_hidden_state": (True,),
}
# and those that are read in the other layout alone
NEUTRAL_ZLAB: dict[str, tuple[Any, ...]] = {"sliding_window_non_causal": (False,)}
NEUTRAL_SPECULATORS: dict[str, tuple[Any, ...]] = {
    "attention_sink_bias": (False,),
    "causal": (),
    "final_logit_softcapping": (),
    "input_embedding_scale": (1.0,),
    "is_causal": (),
    "output_multiplier": (1.0,),
    "swa_window_size": (),
    "use_swa": (False,),
}
FROM_ANCHOR = ("sample_from_anchor", "query_zero_predicts_next")  # two names for one thing
EXPORT_DRAFTER = "Export the drafter again"
OUR_FORMATS = "Use a DFlash drafter in z-lab's or the speculators format"


def read_dflash2(values: Config, fields: dict[str, Any], draft_vocab_size: int) -> Selector:
    """Add z-lab's convolutions to the layers in `fields`; return the selector."""
    convolution = Convolution(
        kernel_size=values.number("conv_kernel_size"), group_size=values.number("conv_group_size")
    )
    fields["layers"] = tuple(replace(layer, convolution=convolution) for layer in fields["layers"])
    top_k = values.number("selector_top_k")
    if top_k > draft_vocab_size:
        problem = f"selector_top_k is {top_k}, but drafts are of {draft_vocab_size} tokens"
        raise values.wrong(problem, "Take the config.json that came with it")
    return Selector(rank=values.number("selector_rank"), top_k=top_k)


def refuse_unread(values: Config, unread: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse fields that change what is drafted, if nothing here reads them."""
    for name, neutral in {**NEUTRAL, **unread}.items():
        if values.get(name) is not None and values[name] not in neutral:
            raise values.refuse(f"{name} is {values[name]!r}")


def samples_from_anchor(values: Config) -> bool:
    """Return whether the anchor's place predicts the first draft, by either name of the flag."""
    flags = {name: values.flag(name) for name in FROM_ANCHOR if values.get(name) is not None}
    if len({*flags.values()}) > 1:
        raise values.wrong(f"{' and '.join(flags)} contradict each other", EXPORT_DRAFTER)
    return any(flags.values())


def zlab(config: Config) -> DrafterSpec:
    """Read each value from `dflash_config`, then from the top level, as z-lab's code does."""
    values = config.overridden_by(config.section("dflash_config"))
    second = DFLASH2 in config["architectures"]
    dflash2_only = {} if second else {"selector_rank": (), "conv_kernel_size": ()}
    refuse_unread(values, {**NEUTRAL_ZLAB, **dflash2_only})
    for other, name in (("draft_vocab_size", "vocab_size"), ("target_hidden_size", "hidden_size")):
        if values.get(other) not in (None, config.get(name)):
            raise config.refuse(f"the drafter's {name} and the target's differ ({other})")
    fields = decoder_fields(config)
    fields["layers"] = _with_attention_kinds(values, fields["layers"])
    selector = read_dflash2(values, fields, fields["vocab_size"]) if second else None
    cap = values.get("final_logit_softcapping")
    from_anchor = samples_from_anchor(values)
    return DrafterSpec(
        **fields,
        qk_norm=True,
        # a block of n rows, all of which draft, is the anchor and as many drafts
        block_size=values.number("block_size", minimum=2 - from_anchor) + from_anchor,
        sample_from_anchor=from_anchor,
        mask_token_id=mask_token(values, "Add it to dflash_config"),
        target_layer_ids=layer_numbers(values, "target_layer_ids"),
        num_target_layers=config.number("num_target_layers"),
        embedding_scale=values.positive("input_embedding_scale", 1.0),
        output_multiplier=values.positive("output_multiplier", 1.0),
        final_logit_softcapping=values.positive("final_logit_softcapping") if cap else None,
        sinks="attention_sink_bias" if values.flag("attention_sink_bias") else None,
        selector=selector,
    )


def deepspec(config: Config) -> DrafterSpec:
    """Return the spec of DeepSpec's plain DFlash: a block of n rows, all of which draft."""
    values = config.overridden_by(config.section("dflash_config"))
    if any(values.flag(name, True) is False for name in FROM_ANCHOR):
        raise values.wrong(f"{DEEPSPEC} drafts from the anchor's place", EXPORT_DRAFTER)
    spec = zlab(config.overridden_by(dict.fromkeys(FROM_ANCHOR, True)))
    return replace(spec, own_tables=TABLES)


def llama_cpp(config: Config, names: Sequence[str]) -> DrafterSpec:
    """Read what a GGUF file states: z-lab's fields, with tables of its own where it has them.

    It does not state for how many layers it was trained.
    """
    spec = zlab(config.overridden_by({"num_target_layers": 1}))
    return replace(
        spec,
        num_target_layers=None,
        own_tables=tuple(table for table in TABLES if f"{table}.weight" in names),
        draft_vocab_size=None if config.get("head_rows") is None else config.number("head_rows"),
    )


def mask_token(values: Config, add: str) -> int:
    if values.get("mask_token_id") is None:
        raise CheckpointError(
            f"{values.file} has no mask_token_id",
            f"{add}: the token id that the drafter was trained with as mask",
        )
    return values.number("mask_token_id", minimum=0)


def check_windows(config: Config, layers: Sequence[LayerSpec]) -> None:
    """Refuse windows without use_sliding_window: transformers' Qwen3Config ignores them."""
    if any(layer.window for layer in layers) and not config.flag("use_sliding_window"):
        raise config.wrong(
            "layer_types has sliding layers, but use_sliding_window is not true, so that "
            "their window counts for nothing in the code the drafter was trained with",
            "Set use_sliding_window to true if it was trained with windows, else make the layers "
            "full_attention and set is_causal to what it was trained with",
        )


def _with_attention_kinds(values: Config, layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    """Make layers with a window causal, unless a field applies to all layers (z-lab, vLLM)."""
    # causal, use_swa and swa_window_size are ModelOpt's, as in vLLM
    check_windows(values, layers)
    causal = values.flag("is_causal", values.flag("causal", None))
    if causal is None:
        layers = tuple(replace(layer, causal=layer.window is not None) for layer in layers)
    else:
        layers = tuple(replace(layer, causal=causal) for layer in layers)
    if values.flag("use_swa"):
        window = values.number("swa_window_size", values.get("sliding_window"))
        layers = tuple(replace(layer, window=window) for layer in layers)
    return layers


def layer_numbers(values: Config, name: str) -> tuple[int, ...]:
    numbers = values.get(name)
    if not isinstance(numbers, list) or not numbers or not all(type(i) is int for i in numbers):
        raise values.wrong(f"{name} is {numbers!r}, not a list of layer numbers", EXPORT_DRAFTER)
    return tuple(numbers)


def speculators(config: Config, names: Sequence[str]) -> DrafterSpec:
    """Read a `DFlashSpeculatorConfig`; its layer tensors have z-lab's names."""
    if not isinstance(config.get("transformer_layer_config"), dict):
        raise CheckpointError(f"{config.file} has no transformer_layer_config", EXPORT_DRAFTER)
    inner = config.section("transformer_layer_config")
    ropes = inner.get("rope_parameters")
    if isinstance(ropes, dict) and SLIDING in ropes:  # it then applies to every layer
        inner = inner.overridden_by({"rope_parameters": ropes[SLIDING]})
    refuse_unread(inner.overridden_by(config), NEUTRAL_SPECULATORS)
    fields = decoder_fields(inner)
    check_windows(inner, fields["layers"])
    hidden = fields["hidden_size"]
    if config.number("target_hidden_size", hidden) != hidden:
        raise config.refuse("the drafter's hidden_size and the target's differ")
    draft_vocab = config.number("draft_vocab_size", 32000)
    second = config["speculators_model_type"] == "dflash2"
    causal = not config.flag("sliding_window_non_causal", second)
    layers = list(fields["layers"])
    for i, layer in enumerate(layers):
        if layer.window:  # `sliding_window` tokens before the anchor, and the whole block
            window = layer.window + 1
            layers[i] = replace(layer, window=window, window_from_anchor=True, causal=causal)
    fields["layers"] = tuple(layers)
    selector = read_dflash2(inner.overridden_by(config), fields, draft_vocab) if second else None
    from_anchor = samples_from_anchor(config)
    return DrafterSpec(
        **fields,
        qk_norm=True,
        block_size=config.number("block_size", minimum=2 - from_anchor) + from_anchor,
        mask_token_id=mask_token(config, "Add it"),
        # they count the embedding as 0, so they are one more than z-lab's
        target_layer_ids=tuple(i - 1 for i in layer_numbers(config, "aux_hidden_state_layer_ids")),
        sample_from_anchor=from_anchor,
        own_tables=tuple(table for table in TABLES if f"{table}.weight" in names),
        draft_vocab_size=None if draft_vocab == fields["vocab_size"] else draft_vocab,
        selector=selector,
    )


def draft_token_ids(weights: Weights, spec: DrafterSpec) -> npt.NDArray[np.int64]:
    """Return target ids by scored token, int64 `[draft_vocab_size]`; CheckpointError if invalid."""
    stored = weights.read("d2t")  # differences of the two ids
    ids: npt.NDArray[np.int64] = stored.astype(np.int64) + np.arange(len(stored))
    distinct = stored.dtype == np.int64 and len(np.unique(ids)) == len(ids)
    if not distinct or ids.min() < 0 or ids.max() >= spec.vocab_size:
        raise CheckpointError(
            f"d2t of {weights.directory} does not map its {len(ids)} tokens to as many of the "
            f"target's {spec.vocab_size}",
            EXPORT_DRAFTER,
        )
    return ids


def load_drafter(directory: Path) -> Drafter:
    """Read config.json and weight headers; CheckpointError if invalid or unsupported."""
    return unless_refused(open_drafter(directory))


def open_drafter(directory: Path) -> Drafter:
    """Read a drafter, which has a `refusal` if it is unsupported."""
    return open_model("drafter", directory, _read)


def _read(config: Config) -> tuple[DrafterSpec, Weights]:
    directory = config.file.parent
    _require_dflash(config)
    weights = Weights(directory, config)
    if (directory / MASK_EMBEDDING).exists():
        what = f"{directory}: the drafter has an embedding of its own for masks ({MASK_EMBEDDING})"
        raise CheckpointError(what, OUR_FORMATS)
    if (directory / LINK).is_file():
        return llama_cpp(config, weights.names), weights
    if "speculators_model_type" in config:
        return speculators(config, weights.names), weights
    if is_deepspec(config):
        return deepspec(config), weights
    return zlab(config), weights


def other_method(config: Mapping[str, Any]) -> str | None:
    """Name the drafter's method by its config.json; None for DFlash."""
    if is_deepspec(config):
        return None
    inner = config.get("dflash_config")
    values = {**config, **inner} if isinstance(inner, Mapping) else config
    names = " ".join(map(str, _method_fields(config))).lower()
    if values.get("lilicorr_enabled"):  # the only sign in some exports
        names += " lilicorr"
    return next((name for name in OTHERS if name.lower() in names), None)


def is_deepspec(config: Mapping[str, Any]) -> bool:
    plain = config.get("markov_rank") == 0 and not config.get("enable_confidence_head")
    return plain and config.get("architectures") == [DEEPSPEC]


def drafter_format(drafter: Drafter) -> str:
    config = drafter.values
    if (drafter.directory / LINK).is_file():
        return "GGUF"
    if "speculators_model_type" in config:
        return "speculators"
    return "DeepSpec" if is_deepspec(config) else "z-lab"


def is_eagle3(config: Mapping[str, Any]) -> bool:
    """Recognize an EAGLE-3 head's config.json, which may look like a plain Llama's."""
    kind, _, architectures = _method_fields(config)
    marked = "Eagle3" in str(architectures) or kind == "eagle3"
    return marked or (not is_dflash(config) and "draft_vocab_size" in config)


def is_dflash(config: Mapping[str, Any]) -> bool:
    architectures = config.get("architectures")
    zlabs = isinstance(architectures, list) and any(name in architectures for name in ZLABS)
    return zlabs or is_deepspec(config) or "speculators_model_type" in config


def _method_fields(config: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Return speculators' type, z-lab's projector type and the architectures."""
    inner = config.get("dflash_config")
    projector = inner.get("projector_type") if isinstance(inner, dict) else None
    return config.get("speculators_model_type"), projector, config.get("architectures")


def _require_dflash(config: Config) -> None:
    kind, projector, architectures = _method_fields(config)
    other = other_method(config)
    if other:
        raise config.wrong(
            f"the drafter is {other}; dflash-trt runs DFlash drafters",
            "Use a DFlash drafter of the same target",
        )
    known = is_dflash(config) if kind is None else kind in ("dflash", "dflash2")
    if not known or projector not in (None, "dflash"):
        raise config.wrong(
            f"the drafter's kind is not known to dflash-trt (architectures "
            f"{architectures}, speculators_model_type {kind}, projector_type {projector})",
            OUR_FORMATS,
        )


def drafter_shapes(spec: DrafterSpec) -> Shapes:
    """Return what the drafter's graph reads from its own checkpoint."""
    hidden = spec.hidden_size
    shapes: Shapes = {
        "fc.weight": (hidden, len(spec.target_layer_ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i in range(spec.num_hidden_layers):
        shapes |= layer_shapes(spec, i)
    if spec.selector is not None:
        # stored without `.weight`, with a row per token of the target, even if the head has fewer
        # (which speculators 0.9.0 does not write)
        for name in ("predecessor", "successor"):
            shapes[f"candidate_selector.{name}_codebook"] = (spec.vocab_size, spec.selector.rank)
        shapes["candidate_selector.hidden_projection.weight"] = (spec.selector.rank, hidden)
    if "embed_tokens" in spec.own_tables:
        shapes["embed_tokens.weight"] = (spec.vocab_size, hidden)
    if "lm_head" in spec.own_tables:
        shapes["lm_head.weight"] = (spec.num_logits, hidden)
    if spec.draft_vocab_size is not None:
        shapes["d2t"] = (spec.draft_vocab_size,)
    return shapes

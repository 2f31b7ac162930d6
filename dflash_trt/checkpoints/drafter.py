"""The drafter: a DFlash checkpoint in one of the formats in use."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_trt.checkpoints import dflash2
from dflash_trt.checkpoints.fields import Config
from dflash_trt.checkpoints.files import check_directory, read_json
from dflash_trt.checkpoints.spec import DrafterSpec, Shapes, layer_shapes
from dflash_trt.checkpoints.speculators import speculators
from dflash_trt.checkpoints.weights import Weights
from dflash_trt.checkpoints.zlab import zlab
from dflash_trt.errors import CheckpointError

ZLABS = ("DFlashDraftModel", dflash2.ARCHITECTURE)
# drafters of other methods, by a part of their architecture, projector_type or speculators type
OTHERS = {
    "lilicorr": "LiLiCorr, whose head scores all candidates of a block together",
    "dspark": "DSpark, whose tokens each depend on the one before through a Markov head",
    "domino": "Domino, whose tokens each depend on those before through a recurrent head",
    "xpress": "XPress, which refines its tokens in several passes",
    "peagle": "P-EAGLE, which does not inject features into a KV cache",
    "eagle": "EAGLE, which drafts one token at a time",
    "mtp": "a multi-token-prediction head, which drafts one token at a time",
}
LANGUAGE_MODEL = ("ForCausalLM']", "ForConditionalGeneration']")  # how `architectures` end
OUR_FORMATS = "Use a DFlash drafter in z-lab's or the speculators format"
# tensors of vendors' own forms
FORMS = {
    "mask_embedding": "an embedding of its own for masks (MiMo)",
    "qkv_proj": "fused q, k and v projections (Laguna)",
    ".g_proj": "gated attention (Laguna)",
    "aux_hidden_norms": "a norm for each tap (Laguna)",
}


@dataclass(frozen=True)
class Drafter:
    directory: Path
    spec: DrafterSpec
    weights: Weights


def load_drafter(directory: Path) -> Drafter:
    """Read a drafter directory: config.json and weight headers.

    Raises CheckpointError when a file is missing or broken or the drafter is not handled.
    """
    check_directory(directory, "drafter")
    config = Config(directory / "config.json", read_json(directory / "config.json"))
    _check_method(config)
    weights = Weights(directory, config)
    for part, what in FORMS.items():
        if any(part in name for name in weights.names):
            raise CheckpointError(
                f"{directory}: the drafter has {what}, which the graphs do not have", OUR_FORMATS
            )
    if "speculators_model_type" in config:
        return Drafter(directory, speculators(config, weights.names), weights)
    return Drafter(directory, zlab(config), weights)


def other_method(config: Mapping[str, Any]) -> str | None:
    """What a drafter is, by its config.json, if not DFlash."""
    inner = config.get("dflash_config")
    own = {**config, **inner} if isinstance(inner, Mapping) else config
    marks = ["lilicorr"] * bool(own.get("lilicorr_enabled"))  # its one mark in some exports
    names = " ".join(map(str, (*_method(config), *marks))).lower()
    return next((what for part, what in OTHERS.items() if part in names), None)


def is_eagle3(config: Mapping[str, Any]) -> bool:
    """An EAGLE-3 head; its authors' checkpoints have the architecture of a plain Llama."""
    kind, _, architectures = _method(config)
    marked = "Eagle3" in str(architectures) or kind == "eagle3"
    return marked or (not is_drafter(config) and "draft_vocab_size" in config)


def is_drafter(config: Mapping[str, Any]) -> bool:
    """Whether config.json is a DFlash drafter's, in one of the two formats."""
    architectures = config.get("architectures")
    zlabs = isinstance(architectures, list) and any(name in architectures for name in ZLABS)
    return zlabs or "speculators_model_type" in config


def _method(config: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """speculators' type, z-lab's projector type, the architectures."""
    own = config.get("dflash_config")
    projector = own.get("projector_type") if isinstance(own, dict) else None
    return config.get("speculators_model_type"), projector, config.get("architectures")


def _check_method(config: Config) -> None:
    """CheckpointError unless config.json is a DFlash drafter's."""
    kind, projector, architectures = _method(config)
    if what := other_method(config):
        raise config.wrong(
            f"the drafter is {what}; dflash-trt runs DFlash drafters",
            "Use a DFlash drafter of the same target",
        )
    known = is_drafter(config) if kind is None else kind in ("dflash", "dflash2")
    if not known and str(architectures).endswith(LANGUAGE_MODEL):
        raise CheckpointError(
            f"the drafter {config.file.parent} is a language model ({architectures})",
            "Give its DFlash drafter; if target and drafter are swapped, swap them back",
        )
    if not known or projector not in (None, "dflash"):
        raise config.wrong(
            f"the drafter's kind is not known to dflash-trt (architectures "
            f"{architectures}, speculators_model_type {kind}, projector_type {projector})",
            OUR_FORMATS,
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
    if "embed_tokens" in spec.own_tables:
        shapes["embed_tokens.weight"] = (spec.vocab_size, hidden)
    if "lm_head" in spec.own_tables:
        shapes["lm_head.weight"] = (spec.head_size, hidden)
    if spec.draft_vocab_size is not None:
        shapes["d2t"] = (spec.draft_vocab_size,)
    return shapes

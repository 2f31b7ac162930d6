"""Checks of what a drafter was trained with: tokens, tensors, numbers of the target's config."""

from collections.abc import Mapping
from typing import Any

from dflash_trt.checkpoints.drafter import TRAINING_ONLY, drafter_shapes
from dflash_trt.checkpoints.findings import Found, check
from dflash_trt.checkpoints.model import OTHER_DRAFTER, Pair, finite
from dflash_trt.checkpoints.model_checks import tensors_fit
from dflash_trt.checkpoints.target import HEAD

AS_TRAINED = "Write the mask_token_id that it was trained with into the drafter's config.json"


@check("error")
def mask_in_vocabulary(pair: Pair) -> Found:
    """Check that the mask has a row in the target's embedding."""
    mask, size = pair.drafter.number("mask_token_id"), pair.target.number("vocab_size")
    inside = 0 <= mask < size
    return Found(
        inside,
        f"the drafter's mask_token_id {mask} is {'in' if inside else 'outside'} the target's "
        f"vocabulary of {size}",
        OTHER_DRAFTER,
    )


@check("warning")
def mask_is_reserved(pair: Pair) -> Found:
    """Check that the mask is a special token or the first free id, but no end or padding token.

    z-lab and speculators choose so; some trainers fall back to the end, which texts hold too.
    """
    mask, target = pair.drafter.number("mask_token_id"), pair.target
    token, free, same = target.texts.get(mask), target.highest_token + 1, []
    for name in ("eos_token_id", "pad_token_id"):
        ids = target.values.get(name)
        if name == "eos_token_id" and target.read is not None:
            ids = list(target.spec.eos_token_ids)
        if mask in (ids if isinstance(ids, list) else [ids]):
            same.append(name)
    wrong = f"the target's {' and '.join(same)}" if same else ""
    if token is None and mask != free:
        wrong = wrong or f"no token; the first free id is {free}"
    elif token is not None and mask not in target.tokenizer.get_added_tokens_decoder():
        wrong = wrong or f"a token of ordinary text: {token!r}"
    what = wrong or (f"the token {token!r}" if token else "the tokenizer's first free id")
    return Found(not wrong, f"mask_token_id {mask} is {what}", AS_TRAINED)


@check("error")
def same_tokenizer(pair: Pair) -> Found:
    """Check that the drafter's tokenizer, if any, has the target's ids."""
    target, drafter = pair.target.tokens, pair.drafter.tokens
    texts = pair.drafter.texts
    moved = [
        text for text, token in target.items()
        if drafter.get(text, token) != token or texts.get(token, text) != text
    ]  # fmt: skip
    return Found(
        not moved,
        f"the drafter's tokenizer gives {len(moved) or 'none'} of the target's {len(target)} "
        "tokens another id" + (f", first {moved[0]!r}" if moved else ""),
        OTHER_DRAFTER,
    )


@check("error")
def no_own_vocabulary(pair: Pair) -> Found:
    """Check for an own embedding or head, which would be left out."""
    drafter = pair.drafter
    own = sorted(set(drafter.weights.names) - drafter_shapes(drafter.spec).keys())
    own = [name for name in own if name not in TRAINING_ONLY]
    own = [name for name in own if name.endswith((HEAD, "embed_tokens.weight"))]
    return Found(
        not own,
        f"the drafter has {', '.join(own) or 'no embedding and no head'} of its own that would be "
        "left out",
        "Remove them if they are copies of the target's, else use a drafter that shares them",
    )


@check("error")
def drafter_tensors(pair: Pair) -> Found:
    """Check that every tensor is used: an unused one is a missing part of the model."""
    drafter = pair.drafter
    return tensors_fit(drafter.weights, drafter_shapes(drafter.spec), ignored=TRAINING_ONLY)


@check("warning")
def rope(pair: Pair) -> Found:
    """Check RoPE's scaling and base, which equal the target's in training; an export may lose them.

    Without the scaling positions beyond the original ones are unknown.
    """
    drafter, target = _ropes(pair.drafter.values), _ropes(pair.target.values)
    return Found(
        (bool(drafter) and drafter <= target) or not target,
        f"the drafter's RoPE is {_names(drafter)}, the target's {_names(target)}",
        "Check rope_theta, rope_scaling and rope_parameters in the drafter's config.json against "
        "the published one",
    )


@check("warning")
def embedding_scale(pair: Pair) -> Found:
    """Check that the drafter scales embeddings like its target (Gemma: sqrt(hidden_size))."""
    own, expected = finite(pair.drafter.values.get("input_embedding_scale")), 1.0
    if pair.target.read is not None:
        expected = pair.target.spec.embedding_scale
    elif str(pair.target.values.get("model_type")).startswith("gemma"):
        expected = max(pair.target.number("hidden_size"), 1) ** 0.5
    return Found(
        abs((own or 1.0) - expected) <= 0.01 * expected,
        f"the drafter's input_embedding_scale is {own or 1.0:g}, the target's embeddings are "
        f"multiplied by {expected:g}",
        "Check input_embedding_scale in the drafter's config.json against the published one",
    )


def _ropes(config: Mapping[str, Any]) -> set[str]:
    """Return scaling and base of each stated RoPE: one for all layers, or by layer type."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    inner = list(found.values()) if isinstance(found, dict) else []
    ropes = [rope for rope in inner if isinstance(rope, dict)] or [found]
    stated = set()
    for rope in ropes:
        own = {**config, **rope} if isinstance(rope, dict) else config
        kind = own.get("rope_type", own.get("type", "default"))
        # proportional: rotates part of each head, which is no scaling
        kind = "default" if kind == "proportional" else kind
        if theta := finite(own.get("rope_theta")):
            stated.add(f"{kind} {theta:g}")
    return stated


def _names(ropes: set[str]) -> str:
    return " and ".join(sorted(ropes)) or "not stated"

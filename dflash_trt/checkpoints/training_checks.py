"""Checks of what a drafter was trained with: tokens, tensors, numbers of the target's config."""

from collections.abc import Mapping
from typing import Any

from dflash_trt.checkpoints.drafter import TRAINING_ONLY, draft_token_ids, drafter_shapes
from dflash_trt.checkpoints.findings import Found, NotKnown, check
from dflash_trt.checkpoints.model import OTHER_DRAFTER, Pair, finite
from dflash_trt.checkpoints.model_checks import HEAD, tensors_fit

# by vocabulary: mask tokens of z-lab's published drafters
PUBLISHED = {
    128256: (128002,),  # Llama 3.1
    151936: (151669,),  # Qwen3
    163840: (163838,),  # Kimi K2.5
    201088: (200000,),  # gpt-oss
    248320: (248070, 248077),  # Qwen3.5 and later; drafters with eight taps have the second
    262144: (4,),  # Gemma
}
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
def mask_as_published(pair: Pair) -> Found:
    """Check the mask token: another one than in training has an embedding the drafter never saw."""
    mask = pair.drafter.number("mask_token_id")
    usual = PUBLISHED.get(pair.target.number("vocab_size"))
    if usual is None or "speculators_model_type" in pair.drafter.values:
        return Found(
            True, f"mask_token_id is {mask}; no published one is known for this vocabulary"
        )
    return Found(
        mask in usual,
        f"mask_token_id is {mask}, z-lab's drafters for this vocabulary have "
        + " or ".join(map(str, usual)),
        AS_TRAINED,
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


@check("error")
def vocabulary_map(pair: Pair) -> Found:
    """Check the map of a reduced vocabulary: a wrong one turns drafts into other tokens."""
    drafter = pair.drafter
    if drafter.spec.draft_vocab_size is None:
        return Found(True, "the drafter drafts every token of the target's vocabulary")
    count = len(draft_token_ids(drafter.weights, drafter.spec))
    return Found(
        True, f"the drafter drafts {count} of the target's {drafter.spec.vocab_size} tokens"
    )


@check("warning")
def rope_theta(pair: Pair) -> Found:
    """Check the RoPE base, which equals the target's in training; an export may lose it."""
    drafter, target = _thetas(pair.drafter.values), _thetas(pair.target.values)
    if not target and not drafter:
        raise NotKnown("no rope_theta is stated")
    stated = " and ".join(f"{theta:g}" for theta in sorted(drafter)) or "not stated"
    return Found(
        (bool(drafter) and drafter <= target) or not target,
        f"the drafter's rope_theta is {stated}, the target's "
        + (" and ".join(f"{theta:g}" for theta in sorted(target)) or "not stated"),
        "Check rope_theta (rope_parameters) in the drafter's config.json against the published one",
    )


@check("warning")
def rope_scaling(pair: Pair) -> Found:
    """Check the RoPE scaling, without which positions beyond the original ones are unknown."""
    drafter, target = _scalings(pair.drafter.values), _scalings(pair.target.values)
    return Found(
        drafter <= target if drafter else not target,
        f"the drafter's RoPE scaling is {_names(drafter)}, the target's {_names(target)}",
        "Check rope_scaling (rope_parameters) in the drafter's config.json",
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


@check("warning")
def verifier(pair: Pair) -> Found:
    """Check the architecture that a speculators drafter was trained for."""
    config = pair.drafter.values.get("speculators_config")
    found = config.get("verifier") if isinstance(config, dict) else None
    theirs = found.get("architectures") if isinstance(found, dict) else None
    ours = pair.target.values.get("architectures")
    if not isinstance(theirs, list) or not theirs or not isinstance(ours, list):
        raise NotKnown("the drafter does not say for which architecture it was trained")
    return Found(
        any(name in ours for name in theirs),
        f"the drafter was trained for {', '.join(map(str, theirs))}, the target is "
        f"{', '.join(map(str, ours))}",
        OTHER_DRAFTER,
    )


def _thetas(config: Mapping[str, Any]) -> set[float]:
    stated = [rope.get("rope_theta") for rope in (config, *_ropes(config))]
    return {theta for value in stated if (theta := finite(value))}


def _scalings(config: Mapping[str, Any]) -> set[str]:
    kinds = [rope.get("rope_type", rope.get("type", "default")) for rope in _ropes(config)]
    # proportional: rotates part of each head, which is no scaling
    return {str(kind) for kind in kinds} - {"default", "proportional"}


def _ropes(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the RoPE parameters of all layers, or by layer type."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(found, dict):
        return []
    return [inner for inner in found.values() if isinstance(inner, dict)] or [found]


def _names(kinds: set[str]) -> str:
    return " and ".join(sorted(kinds)) or "default"

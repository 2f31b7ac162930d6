"""Numbers of the drafter's config that should follow the target's."""

from collections.abc import Mapping
from typing import Any

from dflash_trt.checkpoints.checks import Found, NotKnown, check
from dflash_trt.checkpoints.summary import OTHER_DRAFTER, Pair, finite


@check("warning")
def rope_theta(pair: Pair) -> Found:
    """Drafters are trained with the target's RoPE base; an export may lose it."""
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
    """The same for the scaling: without it positions beyond the original ones are unknown."""
    drafter, target = _scalings(pair.drafter.values), _scalings(pair.target.values)
    return Found(
        drafter <= target if drafter else not target,
        f"the drafter's RoPE scaling is {_names(drafter)}, the target's {_names(target)}",
        "Check rope_scaling (rope_parameters) in the drafter's config.json",
    )


@check("warning")
def embedding_scale(pair: Pair) -> Found:
    """Gemma multiplies embeddings by sqrt(hidden_size); its drafters must do so too."""
    own, expected = finite(pair.drafter.values.get("input_embedding_scale")), 1.0
    if pair.target.model is not None:
        expected = pair.target.model.spec.embedding_scale
    elif str(pair.target.values.get("model_type")).startswith("gemma"):
        expected = max(pair.target.number("hidden_size"), 1) ** 0.5
    return Found(
        abs((own or 1.0) - expected) <= 0.01 * expected,
        f"the drafter's input_embedding_scale is {own or 1.0:g}, the target's embeddings are "
        f"multiplied by {expected:g}",
        "Check input_embedding_scale in the drafter's config.json against the published one",
    )


@check("warning")
def logit_softcap(pair: Pair) -> Found:
    """Does not move the best token, but where drafts are sampled it makes them fit worse."""
    name = "final_logit_softcapping"
    drafter, target = (finite(m.values.get(name)) or 0.0 for m in (pair.drafter, pair.target))
    return Found(
        drafter == target,
        f"the drafter's {name} is {drafter:g}, the target's {target:g}",
        f"Check {name} in the drafter's config.json against the published one",
    )


@check("warning")
def verifier(pair: Pair) -> Found:
    """The speculators format says for which architecture a drafter was trained."""
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
    # proportional: turns a part of each head, which is no scaling
    return {str(kind) for kind in kinds} - {"default", "proportional"}


def _ropes(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of all layers, or by layer type."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(found, dict):
        return []
    return [inner for inner in found.values() if isinstance(inner, dict)] or [found]


def _names(kinds: set[str]) -> str:
    return " and ".join(sorted(kinds)) or "default"

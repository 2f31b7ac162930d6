"""Checks of a target and its DFlash drafter: shapes, taps, how the drafter was trained."""

from collections.abc import Mapping
from typing import Any

from dflash_trt.checkpoints.drafter import (
    TRAINING_ONLY,
    drafter_shapes,
)
from dflash_trt.checkpoints.model import OTHER_DRAFTER, Pair, finite_or_none
from dflash_trt.checkpoints.target import HEAD
from dflash_trt.checks.findings import Check, Found, check
from dflash_trt.checks.target import tensors_fit

AS_TRAINED = "Write the mask_token_id that it was trained with into the drafter's config.json"


@check("error")
def hidden_size(pair: Pair) -> Found:
    """Check the width: the drafter reads the target's hidden states, and shares its tables."""
    return _equal(pair, "hidden_size", "hidden_size")


@check("error")
def vocabulary(pair: Pair) -> Found:
    """Check that ids are the same embedding rows."""
    return _equal(pair, "vocab_size", "vocab_size")


@check("error")
def target_layers(pair: Pair) -> Found:
    """Check the number of target layers that the drafter was trained for, which taps refer to."""
    return _equal(pair, "num_target_layers", "num_hidden_layers")


@check("error")
def draft_tokens(pair: Pair) -> Found:
    """Check that drafts fit the trained block: positions beyond it were never trained."""
    size = pair.drafter.number("block_size")
    requested = pair.draft_tokens
    if requested is None:
        return Found(True, f"a round drafts at most {size - 1} tokens")
    return Found(
        requested < size,
        f"speculation.draft_tokens is {requested}, a block of {size} holds {size - 1} draft tokens",
        f"Set it to at most {size - 1}, or leave it out",
    )


@check("warning")
def context_length(pair: Pair) -> Found:
    """Check the drafter's positions: beyond them drafts get worse; the text stays correct."""
    reach = pair.drafter.number("max_position_embeddings")
    # a scaled RoPE covers `factor` times its original positions
    for layer in pair.drafter.layers if pair.drafter.read else ():
        factor = finite_or_none(layer.rope.parameters.get("factor"))
        original = finite_or_none(layer.rope.parameters.get("original_max_position_embeddings"))
        if factor and original:
            reach = min(reach, int(factor * original))
    if pair.max_seq_len is None:
        longest = pair.target.number("max_position_embeddings")
        required = f"the target {longest}"
    else:
        longest = pair.max_seq_len
        required = f"serving.max_seq_len is {longest}"
    return Found(
        longest <= reach,
        f"the drafter knows {reach} positions, {required}",
        f"Set serving.max_seq_len to at most {reach}, or use a drafter trained on longer texts",
    )


def _equal(pair: Pair, of_drafter: str, of_target: str) -> Found:
    drafter = pair.drafter.number(of_drafter)
    target = pair.target.number(of_target)
    word = "and" if drafter == target else "but"
    what = f"the drafter's {of_drafter} is {drafter}, {word} the target has {target}"
    return Found(drafter == target, what, OTHER_DRAFTER)


def default_taps(layers: int, count: int) -> tuple[int, ...]:
    """Return z-lab's `build_target_layer_ids`: from the second layer to the third-last."""
    if count == 1:
        return (layers // 2,)
    return tuple(round(1 + i * (layers - 4) / (count - 1)) for i in range(count))


@check("error")
def taps_in_range(pair: Pair) -> Found:
    """Check that the target has every tapped layer, and more after the last."""
    # transformers returns the last layer's output normed, other servers do not
    last = pair.target.number("num_hidden_layers") - 1
    taps = pair.drafter.taps
    wrong = tuple(tap for tap in taps if not 0 <= tap < last)
    return Found(
        not wrong,
        f"the drafter taps layer {joined(wrong or taps)} (target_layer_ids), this target's layers "
        f"are 0 to {last}, of which the last is never tapped",
        OTHER_DRAFTER,
    )


@check("warning")
def taps_off_by_one(pair: Pair) -> Found:
    """Check for taps off by one, which draft badly: z-lab counts from 0, others from 1."""
    taps = pair.drafter.taps
    usual = default_taps(pair.target.number("num_hidden_layers"), len(taps))
    what = f"the drafter's taps are {joined(taps)}"
    is_off = False
    for offset in (1, -1):
        if taps == tuple(tap + offset for tap in usual):
            is_off = True
            what += f", each {offset:+d} from the usual {joined(usual)}"
    return Found(
        len(taps) < 2 or not is_off,
        what,
        "Check target_layer_ids against the published ones: z-lab's ids count from 0, those of "
        "speculators and llama.cpp from 1",
    )


def joined(taps: tuple[int, ...]) -> str:
    return ", ".join(map(str, taps))


@check("error")
def mask_in_vocabulary(pair: Pair) -> Found:
    """Check that the mask has a row in the target's embedding."""
    mask = pair.drafter.number("mask_token_id")
    size = pair.target.number("vocab_size")
    inside = 0 <= mask < size
    where = "in" if inside else "outside"
    what = f"the drafter's mask_token_id {mask} is {where} the target's vocabulary of {size}"
    return Found(inside, what, OTHER_DRAFTER)


@check("warning")
def mask_is_reserved(pair: Pair) -> Found:
    """Check that the mask is a special token or the first free id, but no end or padding token."""
    # z-lab and speculators choose so; some trainers fall back to the end, which texts hold too
    mask = pair.drafter.number("mask_token_id")
    target = pair.target
    text = target.token_texts.get(mask)
    free = target.highest_token + 1
    ends = target.values.get("eos_token_id")
    if target.read is not None:
        ends = list(target.spec.eos_token_ids)
    same = []
    others = {"eos_token_id": ends, "pad_token_id": target.values.get("pad_token_id")}
    for name, ids in others.items():
        if mask in (ids if isinstance(ids, list) else [ids]):
            same.append(name)
    ok = False
    if same:
        what = f"the target's {' and '.join(same)}"
    elif text is None and mask != free:
        what = f"no token; the first free id is {free}"
    elif text is not None and mask not in target.tokenizer.get_added_tokens_decoder():
        what = f"a token of ordinary text: {text!r}"
    else:
        ok = True
        what = f"the token {text!r}" if text else "the tokenizer's first free id"
    return Found(ok, f"mask_token_id {mask} is {what}", AS_TRAINED)


@check("error")
def same_tokenizer(pair: Pair) -> Found:
    """Check that the drafter's tokenizer, if any, has the target's ids."""
    target, drafter = pair.target.tokens, pair.drafter.tokens
    texts = pair.drafter.token_texts
    moved = [
        text for text, token in target.items()
        if drafter.get(text, token) != token or texts.get(token, text) != text
    ]  # fmt: skip
    first = f", first {moved[0]!r}" if moved else ""
    return Found(
        not moved,
        f"the drafter's tokenizer gives {len(moved) or 'none'} of the target's {len(target)} "
        f"tokens another id{first}",
        OTHER_DRAFTER,
    )


@check("error")
def no_own_vocabulary(pair: Pair) -> Found:
    """Check for an own embedding or head, which would be left out."""
    drafter = pair.drafter
    used = {*drafter_shapes(drafter.spec), *TRAINING_ONLY}
    unused = sorted(set(drafter.weights.names) - used)
    tables = [name for name in unused if name.endswith((HEAD, "embed_tokens.weight"))]
    return Found(
        not tables,
        f"the drafter has {', '.join(tables) or 'no embedding and no head'} of its own that would "
        "be left out",
        "Remove them if they are copies of the target's, else use a drafter that shares them",
    )


@check("error")
def drafter_tensors(pair: Pair) -> Found:
    """Check that every tensor is used: an unused one is a missing part of the model."""
    drafter = pair.drafter
    return tensors_fit(drafter.weights, drafter_shapes(drafter.spec), ignored=TRAINING_ONLY)


@check("warning")
def rope(pair: Pair) -> Found:
    """Check RoPE's scaling and base: the target's in training, but an export may lose them."""
    drafter = _ropes(pair.drafter.values)
    target = _ropes(pair.target.values)
    return Found(
        (bool(drafter) and drafter <= target) or not target,
        f"the drafter's RoPE is {_joined_ropes(drafter)}, the target's {_joined_ropes(target)}",
        "Check rope_theta, rope_scaling and rope_parameters in the drafter's config.json against "
        "the published one",
    )


@check("warning")
def embedding_scale(pair: Pair) -> Found:
    """Check that the drafter scales embeddings like its target (Gemma: sqrt(hidden_size))."""
    scale = finite_or_none(pair.drafter.values.get("input_embedding_scale")) or 1.0
    expected = 1.0
    if pair.target.read is not None:
        expected = pair.target.spec.embedding_scale
    elif str(pair.target.values.get("model_type")).startswith("gemma"):
        expected = max(pair.target.number("hidden_size"), 1) ** 0.5
    return Found(
        abs(scale - expected) <= 0.01 * expected,
        f"the drafter's input_embedding_scale is {scale:g}, the target's embeddings are "
        f"multiplied by {expected:g}",
        "Check input_embedding_scale in the drafter's config.json against the published one",
    )


def _ropes(config: Mapping[str, Any]) -> set[str]:
    """Return scaling and base of each stated RoPE: one for all layers, or by layer type."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(parameters, dict):
        parameters = {}
    by_type = [rope for rope in parameters.values() if isinstance(rope, dict)]
    stated = set()
    for rope in by_type or [parameters]:
        values = {**config, **rope}
        kind = values.get("rope_type", values.get("type", "default"))
        if kind == "proportional":  # rotates part of each head, which is no scaling
            kind = "default"
        theta = finite_or_none(values.get("rope_theta"))
        if theta:
            stated.add(f"{kind} {theta:g}")
    return stated


def _joined_ropes(ropes: set[str]) -> str:
    return " and ".join(sorted(ropes)) or "not stated"


PAIR_CHECKS: list[Check[[Pair]]] = [
    hidden_size,
    vocabulary,
    target_layers,
    draft_tokens,
    context_length,
    taps_in_range,
    taps_off_by_one,
    mask_in_vocabulary,
    mask_is_reserved,
    same_tokenizer,
    no_own_vocabulary,
    drafter_tensors,
    rope,
    embedding_scale,
]

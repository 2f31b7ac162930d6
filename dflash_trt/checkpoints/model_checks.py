"""Checks of the target alone, and of widths, lengths, blocks and taps of the pair."""

from typing import Any

import numpy as np

from dflash_trt.checkpoints.directory import tokenizer_files
from dflash_trt.checkpoints.drafter import default_taps, drafter_shapes
from dflash_trt.checkpoints.fields import SLIDING
from dflash_trt.checkpoints.findings import Check, Found, NotKnown, check
from dflash_trt.checkpoints.model import OTHER_DRAFTER, Pair, finite
from dflash_trt.checkpoints.spec import Shapes
from dflash_trt.checkpoints.target import sampling_defaults, target_shapes
from dflash_trt.checkpoints.weights import Weights
from dflash_trt.errors import CheckpointError

HEAD = "lm_head.weight"
ROWS = 512  # rows read at a time


@check("error")
def target_head(pair: Pair) -> Found:
    """Check tie_word_embeddings: both models use the target's head, possibly a wrong one."""
    target = pair.target
    tied, stored = target.spec.tie_word_embeddings, HEAD in target.weights.names
    embedding = f"{target.spec.prefix}embed_tokens.weight"
    if tied and stored and not _same_numbers(target.weights, HEAD, embedding):
        return Found(
            False,
            f"the target's tie_word_embeddings is true, but its own {HEAD} is not its embedding: "
            "some engines take the embedding for its head, transformers what is stored",
            f"Set tie_word_embeddings to false if {HEAD} is right, else remove that tensor",
        )
    return Found(
        tied or stored,
        f"the target's tie_word_embeddings is {str(tied).lower()} and it has "
        f"{'its own' if stored else 'no'} {HEAD}",
        "Set tie_word_embeddings to true if its head is its embedding, or export the model again",
    )


@check("error")
def target_tensors(pair: Pair) -> Found:
    """Check that every tensor is used: an unused one is a missing part of the model."""
    target = pair.target
    # a multimodal model has its decoder in a separate name space
    scope = target.spec.prefix if "language_model" in target.spec.prefix else ""
    return tensors_fit(target.weights, target_shapes(target.spec), scope, ignored=(HEAD,))


@check("error")
def tokenizer(pair: Pair) -> Found:
    """Check that there is a tokenizer, which serving requires."""
    tokenizer_files(pair.target.directory)
    return Found(True, f"the target's tokenizer has {len(pair.target.tokens)} tokens")


@check("warning")
def sampling_recommended(pair: Pair) -> Found:
    """Check generation_config.json, whose values are defaults of requests."""
    found, problem = sampling_defaults(pair.target.directory)
    stated = ", ".join(f"{name} {value}" for name, value in found.items()) or "nothing"
    what = f"{problem}: the file is ignored" if problem else f"the target recommends {stated}"
    return Found(not problem, what, "Correct it")


@check("error")
def tokenizer_fits(pair: Pair) -> Found:
    """Check that the embedding has a row for every id of the tokenizer."""
    highest, size = pair.target.highest_token, pair.target.number("vocab_size")
    return Found(
        highest < size,
        f"the target's tokenizer gives ids up to {highest}, its vocabulary has {size}",
        "Use the tokenizer that belongs to this model",
    )


OF_THE_TARGET: list[Check[Any]] = [
    target_head,
    target_tensors,
    sampling_recommended,
    tokenizer,
    tokenizer_fits,
]


def tensors_fit(
    weights: Weights, expected: Shapes, scope: str = "", ignored: tuple[str, ...] = ()
) -> Found:
    """Check that all expected tensors exist, with their shapes, and no others under `scope`."""
    for name, shape in expected.items():
        if weights.shape(name) != shape:
            raise CheckpointError(
                f"tensor {name} of {weights.directory} is {list(weights.shape(name))}, but its "
                f"config.json asks for {list(shape)}",
                "Use the config.json and the weights of one model",
            )
    extra = [n for n in weights.names if not n.endswith("rotary_emb.inv_freq")]
    extra = [n for n in extra if n.startswith(scope) and n not in expected and n not in ignored]
    if extra:
        raise CheckpointError(
            f"{weights.directory} holds {len(extra)} tensors that this kind of model does not have "
            f"({', '.join(extra[:3])})",
            "Check architectures, num_hidden_layers and attention_bias in its config.json",
        )
    return Found(True, f"all {len(expected)} tensors are there, and no others")


def _same_numbers(weights: Weights, *names: str) -> bool:
    """Return whether two matrices are equal; reads them in pieces."""
    if weights.shape(names[0]) != weights.shape(names[1]):
        return False
    pieces = (weights.pieces(name, ROWS) for name in names)
    return all(np.array_equal(a, b) for a, b in zip(*pieces, strict=False))


@check("error")
def hidden_size(pair: Pair) -> Found:
    """Check the width: the drafter reads the target's hidden states, and shares its tables."""
    return _equal(pair, "hidden_size", "hidden_size")


@check("error")
def vocabulary(pair: Pair) -> Found:
    """Check that ids are the same embedding rows; different padding is only a wrong number."""
    found = _equal(pair, "vocab_size", "vocab_size")
    sizes = pair.drafter.number("vocab_size"), pair.target.number("vocab_size")
    try:
        used = pair.target.highest_token + 1
    except NotKnown:
        return found
    if found.ok or min(sizes) < used:
        return found
    fix = "Set the target's vocab_size in the drafter's config.json"
    return found._replace(
        what=f"{found.what}; both hold the tokenizer's {used} tokens, so that only the padding "
        "differs",
        fix=f"If it was trained for this target: {fix[0].lower()}{fix[1:]}",
    )


@check("error")
def target_layers(pair: Pair) -> Found:
    """Check the number of target layers that the drafter was trained for, which taps refer to."""
    return _equal(pair, "num_target_layers", "num_hidden_layers")


@check("error")
def block_size(pair: Pair) -> Found:
    """Check that a block has a mask after the anchor, or there is nothing to draft."""
    size = pair.drafter.number("block_size")
    return Found(
        size >= 2,
        f"the drafter's block_size is {size}, which leaves {max(size - 1, 0) or 'no'} draft "
        f"token{'s' * (size != 2)}",
        "Correct block_size in the drafter's config.json: anchor and masks, at least 2",
    )


@check("warning")
def block_size_stated(pair: Pair) -> Found:
    """Check that block_size is stated: z-lab's default is 16, and a wider block drafts worse."""
    values, own = pair.drafter.values, pair.drafter.number("block_size")
    return Found(
        values.get("block_size") is not None,
        f"the drafter's config.json states {'its' if values.get('block_size') else 'no'} "
        f"block_size; {own} is used",
        "Write the block_size that it was trained with into its config.json",
    )


@check("error")
def draft_tokens(pair: Pair) -> Found:
    """Check that drafts fit the trained block: positions beyond it were never trained."""
    size, asked = pair.drafter.number("block_size"), pair.draft_tokens
    if asked is None:
        return Found(True, f"a round drafts at most {size - 1} tokens")
    return Found(
        asked < size,
        f"speculation.draft_tokens is {asked}, a block of {size} holds {size - 1} draft tokens",
        f"Set it to at most {size - 1}, or leave it out",
    )


@check("warning")
def context_length(pair: Pair) -> Found:
    """Check the drafter's positions: beyond them drafts get worse; the text stays correct.

    A scaled RoPE covers `factor` times its original positions.
    """
    reach = pair.drafter.number("max_position_embeddings")
    for layer in pair.drafter.layers if pair.drafter.read else ():
        factor = finite(layer.rope.parameters.get("factor"))
        original = finite(layer.rope.parameters.get("original_max_position_embeddings"))
        if factor and original:
            reach = min(reach, int(factor * original))
    asked = pair.max_seq_len
    longest = pair.target.number("max_position_embeddings") if asked is None else asked
    return Found(
        longest <= reach,
        f"the drafter knows {reach} positions, "
        + (f"the target {longest}" if asked is None else f"serving.max_seq_len is {asked}"),
        f"Set serving.max_seq_len to at most {reach}, or use a drafter trained on longer texts",
    )


@check("warning")
def sliding_window(pair: Pair) -> Found:
    """Check that a window covers the block, or the last masks see neither anchor nor context."""
    drafter = pair.drafter
    if drafter.read is not None:
        # windows that count from the anchor (speculators) never cut the block
        sliding = [layer for layer in drafter.layers if not layer.window_from_anchor]
        windows = [layer.window for layer in sliding if layer.window]
    else:
        kinds = drafter.values.get("layer_types")
        some = isinstance(kinds, list) and SLIDING in kinds
        windows = [drafter.number("sliding_window")] if some else []
    size = pair.drafter.number("block_size")
    if not windows:
        return Found(True, "no layer of the drafter has a window that cuts its block")
    return Found(
        min(windows) >= size,
        f"the drafter's sliding_window is {min(windows)}, its block {size}",
        "Check sliding_window in the drafter's config.json",
    )


def _equal(pair: Pair, of_drafter: str, of_target: str) -> Found:
    drafter, target = pair.drafter.number(of_drafter), pair.target.number(of_target)
    return Found(
        drafter == target,
        f"the drafter's {of_drafter} is {drafter}, {'and' if drafter == target else 'but'} the "
        f"target has {target}",
        OTHER_DRAFTER,
    )


CORRECT = "Check target_layer_ids in the drafter's config.json against the published one"


@check("error")
def taps_in_range(pair: Pair) -> Found:
    """Check that the target has every tapped layer."""
    layers, taps = pair.target.number("num_hidden_layers"), pair.drafter.taps
    wrong = tuple(tap for tap in taps if not 0 <= tap < layers)
    return Found(
        not wrong,
        f"the drafter taps layer {_listed(wrong or taps)} (target_layer_ids), this target's layers "
        f"are 0 to {layers - 1}",
        OTHER_DRAFTER,
    )


@check("error")
def last_layer_not_tapped(pair: Pair) -> Found:
    """Check for a tapped last layer: transformers returns it normed, other servers do not."""
    last = pair.target.number("num_hidden_layers") - 1
    tapped = last in pair.drafter.taps
    return Found(
        not tapped,
        f"the drafter {'taps' if tapped else 'does not tap'} the target's last layer {last}, whose "
        "output stands behind the final norm in some servers",
        f"{CORRECT}; ids that count from 1 are one too high",
    )


@check("warning")
def taps_stated(pair: Pair) -> Found:
    """Check that target_layer_ids is stated: several drafters do not use z-lab's default."""
    values = pair.drafter.values
    stated = any(values.get(name) for name in ("target_layer_ids", "aux_hidden_state_layer_ids"))
    return Found(
        stated,
        f"the drafter's config.json states {'its' if stated else 'no'} target_layer_ids; "
        f"{_listed(pair.drafter.taps)} are used",
        "Write the target_layer_ids that it was trained with into its config.json",
    )


@check("warning")
def taps_off_by_one(pair: Pair) -> Found:
    """Check for taps off by one: speculators and llama.cpp count from 1, z-lab from 0.

    Neighboring layers still draft, but badly. Detected if every tap is beside z-lab's default.
    """
    taps = pair.drafter.taps
    usual = default_taps(pair.target.number("num_hidden_layers"), len(taps))
    beside = [off for off in (1, -1) if taps == tuple(tap + off for tap in usual)]
    return Found(
        len(taps) < 2 or not beside,
        f"the drafter's taps are {_listed(taps)}"
        + (f", each {beside[0]:+d} from the usual {_listed(usual)}" if beside else ""),
        f"{CORRECT}: z-lab's ids count from 0, those of speculators and llama.cpp from 1",
    )


@check("error")
def fc_width(pair: Pair) -> Found:
    """Check the width of fc, which tells the trained number of taps and hidden size."""
    spec, weights = pair.drafter.spec, pair.drafter.weights
    expected, found = drafter_shapes(spec)["fc.weight"], weights.shape("fc.weight")
    return Found(
        found == expected,
        f"the drafter's fc.weight is {list(found)}, {len(pair.drafter.taps)} taps of hidden size "
        f"{spec.hidden_size} need {list(expected)}",
        "Use the config.json and the weights of one drafter",
    )


def _listed(taps: tuple[int, ...]) -> str:
    return ", ".join(map(str, taps))

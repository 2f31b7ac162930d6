"""Widths, vocabularies, blocks and lengths."""

from dflash_trt.checkpoints.checks import Found, NotKnown, check
from dflash_trt.checkpoints.fields import SLIDING
from dflash_trt.checkpoints.summary import OTHER_DRAFTER, Pair, finite


@check("error")
def hidden_size(pair: Pair) -> Found:
    """The drafter reads the target's hidden states and borrows its embedding and head."""
    return _equal(pair, "hidden_size", "hidden_size")


@check("error")
def vocabulary(pair: Pair) -> Found:
    """Ids must mean the same rows of the embedding. A different padding is only a wrong number."""
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
    """Taps count layers of the target that the drafter was trained for."""
    return _equal(pair, "num_target_layers", "num_hidden_layers")


@check("error")
def block_size(pair: Pair) -> Found:
    """Without a mask behind the anchor there is nothing to draft."""
    size = pair.drafter.number("block_size")
    return Found(
        size >= 2,
        f"the drafter's block_size is {size}, which leaves {max(size - 1, 0) or 'no'} draft "
        f"token{'s' * (size != 2)}",
        "Correct block_size in the drafter's config.json: anchor and masks, at least 2",
    )


@check("warning")
def block_size_stated(pair: Pair) -> Found:
    """A block wider than trained drafts worse; z-lab's code takes 16 where nothing is stated."""
    values, own = pair.drafter.values, pair.drafter.number("block_size")
    return Found(
        values.get("block_size") is not None,
        f"the drafter's config.json states {'its' if values.get('block_size') else 'no'} "
        f"block_size; {own} is used",
        "Write the block_size that it was trained with into its config.json",
    )


@check("error")
def draft_tokens(pair: Pair) -> Found:
    """More drafts than the trained block holds would come from positions never trained."""
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
    """Beyond the positions that the drafter knows it drafts worse and worse; the text stays right.

    A scaled RoPE reaches `factor` times its original positions.
    """
    reach = pair.drafter.number("max_position_embeddings")
    for layer in pair.drafter.layers if pair.drafter.model else ():
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
    """A window shorter than the block hides the anchor and the context from the last masks."""
    drafter = pair.drafter
    if drafter.model is not None:
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

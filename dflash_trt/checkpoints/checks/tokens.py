"""The mask token and the tokenizers."""

from dflash_trt.checkpoints.checks import Found, check
from dflash_trt.checkpoints.summary import OTHER_DRAFTER, Pair

# by vocabulary: what z-lab's drafters were trained with, from their published config.json
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
    """The masks of a block are rows of the target's embedding."""
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
    """Another mask than in training is an embedding that the drafter has never seen."""
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
def mask_in_tokenizer(pair: Pair) -> Found:
    """z-lab and speculators take a token of the tokenizer, or the first id that it leaves free."""
    mask, free = pair.drafter.number("mask_token_id"), pair.target.highest_token + 1
    token = pair.target.texts.get(mask)
    if token is None and mask == free:
        return Found(True, f"mask_token_id {mask} is the first id that the tokenizer leaves free")
    return Found(
        token is not None,
        f"mask_token_id {mask} is "
        + (
            f"the token {token!r}"
            if token is not None
            else f"no token; the first free id is {free}"
        ),
        AS_TRAINED,
    )


@check("warning")
def mask_is_special(pair: Pair) -> Found:
    """A token that texts hold cannot stand for a position to be filled."""
    mask = pair.drafter.number("mask_token_id")
    token = pair.target.texts.get(mask)
    added = pair.target.tokenizer.get_added_tokens_decoder()
    return Found(
        token is None or mask in added,
        f"mask_token_id {mask} is {'no' if token is None or mask in added else 'a'} token of "
        f"ordinary text" + ("" if token is None else f": {token!r}"),
        AS_TRAINED,
    )


@check("warning")
def mask_is_no_end(pair: Pair) -> Found:
    """Some trainers fall back to the end or padding token, which texts hold too."""
    mask, same = pair.drafter.number("mask_token_id"), []
    for name in ("eos_token_id", "pad_token_id"):
        ids = pair.target.values.get(name)
        if name == "eos_token_id" and pair.target.model is not None:
            ids = list(pair.target.model.spec.eos_token_ids)
        if mask in (ids if isinstance(ids, list) else [ids]):
            same.append(name)
    return Found(
        not same,
        f"mask_token_id {mask} is "
        + (f"the target's {' and '.join(same)}" if same else "no end or padding token"),
        AS_TRAINED,
    )


@check("error")
def same_tokenizer(pair: Pair) -> Found:
    """A drafter that came with another tokenizer was trained on other ids."""
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

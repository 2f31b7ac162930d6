"""Checks of EAGLE-3 heads.

Tensors and fields are those of their authors (github.com/SafeAILab/EAGLE, `cnets.py`): one
decoder layer (`midlayer`) over a token's embedding and a state that `fc` makes from hidden states
of three target layers; drafts have `draft_vocab_size` tokens, which `d2t` maps to the target's.
"""

from dflash_trt.checkpoints.model import OTHER_DRAFTER, NotKnown, Pair
from dflash_trt.checks.findings import Check, Found, check


@check("error")
def head_vocabulary(pair: Pair) -> Found:
    """Check the vocabulary: the head embeds the target's tokens."""
    drafter = pair.drafter.number("vocab_size")
    target = pair.target.number("vocab_size")
    what = f"the head knows {drafter} tokens, the target {target}"
    return Found(drafter == target, what, OTHER_DRAFTER)


@check("error")
def head_tokens(pair: Pair) -> Found:
    """Check for d2t: without it drafts are read as the target's first tokens."""
    size = pair.drafter.values.get("draft_vocab_size")
    weights = pair.drafter.stored
    is_reduced = isinstance(size, int) and size < pair.target.number("vocab_size")
    if is_reduced and weights is None:
        raise NotKnown("the head's tensors cannot be read here")
    is_mapped = weights is not None and "d2t" in weights.names
    where = "there" if is_mapped else "not there"
    what = f"the head drafts {size or 'all'} tokens, d2t is {where}"
    return Found(
        is_mapped or not is_reduced, what, "Use the head as it was published, d2t included"
    )


EAGLE3_CHECKS: list[Check[[Pair]]] = [
    head_vocabulary,
    head_tokens,
]

"""Does an EAGLE-3 head belong to this target? Its tensors and fields as its authors published them.

One decoder layer (`midlayer`) over a token's embedding and a state that `fc` makes of the hidden
states of three of the target's layers; drafts are of `draft_vocab_size` tokens, which `d2t` maps to
the target's (github.com/SafeAILab/EAGLE, `cnets.py`).
"""

from dflash_trt.checkpoints.checks import Found, NotKnown, check
from dflash_trt.checkpoints.summary import OTHER_DRAFTER, Pair

TAPS = 3


@check("error")
def head_vocabulary(pair: Pair) -> Found:
    """It embeds the target's tokens with a table of its own, or with the target's."""
    own, target = pair.drafter.number("vocab_size"), pair.target.number("vocab_size")
    what = f"the head knows {own} tokens, the target {target}"
    return Found(own == target, what, OTHER_DRAFTER)


@check("error")
def head_width(pair: Pair) -> Found:
    """`fc` takes the target's hidden states; another target's are as many numbers, or are not."""
    if pair.drafter.weights is None or "fc.weight" not in pair.drafter.weights.names:
        raise NotKnown("the head's tensors cannot be read here")
    wide, hidden = pair.drafter.weights.shape("fc.weight")[-1], pair.target.number("hidden_size")
    what = f"the head's fc takes {wide} numbers, the target's states are {hidden} each"
    return Found(wide > 0 and wide % hidden == 0, what, OTHER_DRAFTER)


@check("error")
def head_tokens(pair: Pair) -> Found:
    """Without the map its drafts are read as the target's first tokens, which are others."""
    size = pair.drafter.values.get("draft_vocab_size")
    fewer = isinstance(size, int) and size < pair.target.number("vocab_size")
    if fewer and pair.drafter.weights is None:
        raise NotKnown("the head's tensors cannot be read here")
    mapped = pair.drafter.weights is not None and "d2t" in pair.drafter.weights.names
    what = f"the head drafts {size or 'all'} tokens, d2t is {'' if mapped else 'not '}there"
    return Found(mapped or not fewer, what, "Use the head as it was published, d2t included")

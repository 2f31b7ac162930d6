"""Can a language model draft for this target? It has to know the same tokens by the same ids."""

from dflash_trt.checkpoints.checks import Found, NotKnown, check
from dflash_trt.checkpoints.checks.target import HEAD, tensors_fit
from dflash_trt.checkpoints.summary import Pair
from dflash_trt.checkpoints.target import Target, target_shapes

SMALLER = "Use a smaller model of the target's family, with the same tokenizer"


@check("error")
def draft_vocabulary(pair: Pair) -> Found:
    """Its drafts are rows of the target's embedding. Only the padding may be smaller."""
    own, size = pair.drafter.number("vocab_size"), pair.target.number("vocab_size")
    fits = own == size or pair.target.highest_token < own <= size
    return Found(fits, f"the draft model knows {own} tokens, the target {size}", SMALLER)


@check("error")
def draft_tensors(pair: Pair) -> Found:
    """A tensor that is not read is a part of the model that is left out."""
    model = pair.drafter.model
    if not isinstance(model, Target):
        raise NotKnown("the draft model is refused")
    return tensors_fit(model.weights, target_shapes(model.spec), ignored=(HEAD,))

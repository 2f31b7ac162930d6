"""The drafter's tensors against its config, and what it borrows from the target."""

from dflash_trt.checkpoints.checks import Found, check
from dflash_trt.checkpoints.checks.target import HEAD, tensors_fit
from dflash_trt.checkpoints.drafter import drafter_shapes
from dflash_trt.checkpoints.speculators import TRAINING_ONLY, draft_token_ids
from dflash_trt.checkpoints.summary import Pair


@check("error")
def no_own_vocabulary(pair: Pair) -> Found:
    """An embedding or head that the drafter was trained with would be left out."""
    drafter = pair.drafter.loaded
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
    """A tensor that is not read is a part of the model that is left out."""
    drafter = pair.drafter.loaded
    return tensors_fit(drafter.weights, drafter_shapes(drafter.spec), ignored=TRAINING_ONLY)


@check("error")
def vocabulary_map(pair: Pair) -> Found:
    """Drafts of a reduced vocabulary are read as other tokens where its map is wrong."""
    drafter = pair.drafter.loaded
    if drafter.spec.draft_vocab_size is None:
        return Found(True, "the drafter drafts every token of the target's vocabulary")
    count = len(draft_token_ids(drafter.weights, drafter.spec))
    return Found(
        True, f"the drafter drafts {count} of the target's {drafter.spec.vocab_size} tokens"
    )


@check("warning")
def dtype(pair: Pair) -> Found:
    """Values of a bfloat16 target may be too large for a float16 drafter on a GPU."""
    target, drafter = pair.target.loaded.weights, pair.drafter.loaded.weights
    of = [sorted({model.dtype(name) for name in model.names}) for model in (target, drafter)]
    return Found(
        not ("BF16" in of[0] and "F16" in of[1]),
        f"the target's tensors are {', '.join(of[0])}, the drafter's {', '.join(of[1])}",
        "Take the drafter in bfloat16",
    )

"""The tensors against the configs, and what one model borrows from the other."""

import numpy as np

from dflash_trt.checkpoints.checks import Found
from dflash_trt.checkpoints.drafter import drafter_shapes
from dflash_trt.checkpoints.outline import Pair
from dflash_trt.checkpoints.spec import Shapes
from dflash_trt.checkpoints.speculators import TRAINING_ONLY, draft_token_ids
from dflash_trt.checkpoints.target import target_shapes
from dflash_trt.checkpoints.weights import Weights
from dflash_trt.errors import CheckpointError

HEAD = "lm_head.weight"
ROWS = 512  # read at a time


def target_head(pair: Pair) -> Found:
    """Both models end in the target's head; a wrong tie_word_embeddings takes another matrix."""
    target = pair.target.loaded
    tied, stored = target.spec.tie_word_embeddings, HEAD in target.weights.names
    embedding = f"{target.spec.prefix}embed_tokens.weight"
    if tied and stored and not _equal(target.weights, HEAD, embedding):
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


def target_tensors(pair: Pair) -> Found:
    """A tensor that is not read is a part of the model that is left out."""
    target = pair.target.loaded
    # a model that also takes images has its decoder in a name space of its own
    scope = target.spec.prefix if "language_model" in target.spec.prefix else ""
    return _tensors(target.weights, target_shapes(target.spec), scope, ignored=(HEAD,))


def drafter_tensors(pair: Pair) -> Found:
    """A tensor that is not read is a part of the model that is left out."""
    drafter = pair.drafter.loaded
    return _tensors(drafter.weights, drafter_shapes(drafter.spec), ignored=TRAINING_ONLY)


def vocabulary_map(pair: Pair) -> Found:
    """Drafts of a reduced vocabulary are read as other tokens where its map is wrong."""
    drafter = pair.drafter.loaded
    if drafter.spec.draft_vocab_size is None:
        return Found(True, "the drafter drafts every token of the target's vocabulary")
    count = len(draft_token_ids(drafter.weights, drafter.spec))
    return Found(
        True, f"the drafter drafts {count} of the target's {drafter.spec.vocab_size} tokens"
    )


def dtype(pair: Pair) -> Found:
    """Values of a bfloat16 target may be too large for a float16 drafter on a GPU."""
    target, drafter = pair.target.loaded.weights, pair.drafter.loaded.weights
    of = [sorted({model.dtype(name) for name in model.names}) for model in (target, drafter)]
    return Found(
        not ("BF16" in of[0] and "F16" in of[1]),
        f"the target's tensors are {', '.join(of[0])}, the drafter's {', '.join(of[1])}",
        "Take the drafter in bfloat16",
    )


def _equal(weights: Weights, *names: str) -> bool:
    """Whether two matrices hold the same numbers; they are read in pieces."""
    if weights.shape(names[0]) != weights.shape(names[1]):
        return False
    pieces = (weights.pieces(name, ROWS) for name in names)
    return all(np.array_equal(a, b) for a, b in zip(*pieces, strict=False))


def _tensors(
    weights: Weights, expected: Shapes, scope: str = "", ignored: tuple[str, ...] = ()
) -> Found:
    """Each expected tensor is there in its shape, and no other under the prefix `scope`."""
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

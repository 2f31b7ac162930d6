"""The target by itself: its head, its tensors, its tokenizer."""

import numpy as np

from dflash_trt.checkpoints.checks import Found, check
from dflash_trt.checkpoints.spec import Shapes
from dflash_trt.checkpoints.summary import Pair
from dflash_trt.checkpoints.target import target_shapes
from dflash_trt.checkpoints.weights import Weights
from dflash_trt.errors import CheckpointError

HEAD = "lm_head.weight"
ROWS = 512  # read at a time


@check("error")
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


@check("error")
def target_tensors(pair: Pair) -> Found:
    """A tensor that is not read is a part of the model that is left out."""
    target = pair.target.loaded
    # a model that also takes images has its decoder in a name space of its own
    scope = target.spec.prefix if "language_model" in target.spec.prefix else ""
    return tensors_fit(target.weights, target_shapes(target.spec), scope, ignored=(HEAD,))


@check("error")
def tokenizer_fits(pair: Pair) -> Found:
    """Every id that the tokenizer can give needs a row in the embedding."""
    highest, size = pair.target.highest_token, pair.target.number("vocab_size")
    return Found(
        highest < size,
        f"the target's tokenizer gives ids up to {highest}, its vocabulary has {size}",
        "Use the tokenizer that belongs to this model",
    )


def tensors_fit(
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


def _equal(weights: Weights, *names: str) -> bool:
    """Whether two matrices hold the same numbers; they are read in pieces."""
    if weights.shape(names[0]) != weights.shape(names[1]):
        return False
    pieces = (weights.pieces(name, ROWS) for name in names)
    return all(np.array_equal(a, b) for a, b in zip(*pieces, strict=False))

"""What DFlash 2 adds to a drafter: convolutions around each layer's halves, and a selector."""

from pathlib import Path
from typing import Any

from dflash_trt.checkpoints.fields import number
from dflash_trt.checkpoints.spec import Convolution, Selector, Shapes
from dflash_trt.errors import CheckpointError

ARCHITECTURE = "DFlash2DraftModel"
FIELDS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def read_convolution(file: Path, values: dict[str, Any]) -> Convolution:
    """`conv_kernel_size` and `conv_group_size` of z-lab's config."""
    hidden = number(file, values, "hidden_size")
    group = number(file, values, "conv_group_size")
    if hidden % group:
        raise CheckpointError(
            f"{file}: hidden_size {hidden} is no multiple of conv_group_size {group}",
            "Use the config.json that came with the drafter",
        )
    return Convolution(kernel_size=number(file, values, "conv_kernel_size"), group_size=group)


def read_selector(file: Path, values: dict[str, Any]) -> Selector:
    """`selector_rank` and `selector_top_k` of z-lab's config."""
    vocab, top_k = (number(file, values, name) for name in ("vocab_size", "selector_top_k"))
    if top_k > vocab:
        raise CheckpointError(
            f"{file}: selector_top_k is {top_k}, but the vocabulary has {vocab} tokens",
            "Use the config.json that came with the drafter",
        )
    return Selector(rank=number(file, values, "selector_rank"), top_k=top_k)


def selector_shapes(selector: Selector, hidden_size: int, vocab_size: int) -> Shapes:
    """The selector's tensors; the codebooks are stored without `.weight`."""
    codebook = (vocab_size, selector.rank)
    return {
        "candidate_selector.hidden_projection.weight": (selector.rank, hidden_size),
        "candidate_selector.predecessor_codebook": codebook,
        "candidate_selector.successor_codebook": codebook,
    }

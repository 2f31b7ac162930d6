"""What DFlash 2 adds to a drafter: convolutions around each layer's halves, and a selector."""

from dflash_trt.checkpoints.fields import Config
from dflash_trt.checkpoints.spec import Convolution, Selector, Shapes

ARCHITECTURE = "DFlash2DraftModel"
FIELDS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
AS_PUBLISHED = "Use the config.json that came with the drafter"


def read_convolution(values: Config) -> Convolution:
    """`conv_kernel_size` and `conv_group_size` of z-lab's config."""
    hidden, group = values.number("hidden_size"), values.number("conv_group_size")
    if hidden % group:
        raise values.wrong(
            f"hidden_size {hidden} is no multiple of conv_group_size {group}", AS_PUBLISHED
        )
    return Convolution(kernel_size=values.number("conv_kernel_size"), group_size=group)


def read_selector(values: Config, draft_vocab: int) -> Selector:
    """`selector_rank` and `selector_top_k` of z-lab's config; draft_vocab: rows of the head."""
    top_k = values.number("selector_top_k")
    if top_k > draft_vocab:
        raise values.wrong(
            f"selector_top_k is {top_k}, but drafts are of {draft_vocab} tokens", AS_PUBLISHED
        )
    return Selector(rank=values.number("selector_rank"), top_k=top_k)


def selector_shapes(selector: Selector, hidden_size: int, vocab_size: int) -> Shapes:
    """The selector's tensors; the codebooks are stored without `.weight`.

    They have a row for each of the target's tokens, also where the head has fewer (which
    speculators 0.9.0 does not write).
    """
    codebook = (vocab_size, selector.rank)
    return {
        "candidate_selector.hidden_projection.weight": (selector.rank, hidden_size),
        "candidate_selector.predecessor_codebook": codebook,
        "candidate_selector.successor_codebook": codebook,
    }

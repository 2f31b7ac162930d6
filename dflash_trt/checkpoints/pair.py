"""Does this drafter belong to this target? Whatever would make acceptance collapse is an error."""

from dflash_trt.checkpoints.drafter import Drafter, drafter_shapes
from dflash_trt.checkpoints.spec import DrafterSpec, Shapes, TargetSpec
from dflash_trt.checkpoints.target import Target, target_shapes
from dflash_trt.checkpoints.weights import Weights
from dflash_trt.errors import CheckpointError, PairError

OTHER_DRAFTER = "Use the drafter that was trained for this target"


def check_pair(target: Target, drafter: Drafter, draft_tokens: int | None) -> None:
    """Check the two specs against each other and every tensor against its spec.

    draft_tokens: the length the config fixes, or None.
    Raises PairError for a wrong pair, CheckpointError for a missing or misshapen tensor.
    """
    _check_specs(target.spec, drafter.spec)
    _check_draft_tokens(drafter.spec.block_size, draft_tokens)
    _check_fc(drafter)
    # a model that also takes images has its decoder in a name space of its own
    scope = target.spec.prefix if "language_model" in target.spec.prefix else ""
    shapes = target_shapes(target.spec)
    _check_tensors(target.weights, shapes, scope, ignored=("lm_head.weight",))
    _check_tensors(drafter.weights, drafter_shapes(drafter.spec))


def _check_specs(target: TargetSpec, drafter: DrafterSpec) -> None:
    for name, of_target in (
        ("hidden_size", target.hidden_size),
        ("vocab_size", target.vocab_size),
        ("num_target_layers", target.num_hidden_layers),
    ):
        of_drafter = getattr(drafter, name)
        if of_drafter != of_target:
            raise PairError(
                f"the drafter's {name} is {of_drafter}, but the target has {of_target}",
                OTHER_DRAFTER,
            )
    # the last layer's output is left out: transformers hands out its normed state instead
    last = target.num_hidden_layers - 2
    for tap in drafter.target_layer_ids:
        if not 0 <= tap <= last:
            raise PairError(
                f"the drafter taps layer {tap} (target_layer_ids), but this target's taps are "
                f"0 to {last}",
                OTHER_DRAFTER,
            )
    if not 0 <= drafter.mask_token_id < target.vocab_size:
        raise PairError(
            f"the drafter's mask_token_id {drafter.mask_token_id} is outside the target's "
            f"vocabulary of {target.vocab_size}",
            OTHER_DRAFTER,
        )


def _check_draft_tokens(block_size: int, draft_tokens: int | None) -> None:
    if block_size < 2:
        raise PairError(
            f"the drafter's block_size is {block_size}, which leaves no draft token",
            "Correct block_size in the drafter's config.json: anchor and masks, at least 2",
        )
    if draft_tokens is not None and draft_tokens > block_size - 1:
        raise PairError(
            f"speculation.draft_tokens is {draft_tokens}, but a block of {block_size} holds "
            f"{block_size - 1} draft tokens",
            f"Set it to at most {block_size - 1}, or leave it out",
        )


def _check_fc(drafter: Drafter) -> None:
    """Its width says for how many taps, and for which hidden size, the drafter was trained."""
    expected = drafter_shapes(drafter.spec)["fc.weight"]
    found = drafter.weights.shape("fc.weight")
    if found != expected:
        taps = len(drafter.spec.target_layer_ids)
        raise PairError(
            f"the drafter's fc.weight is {list(found)}, but {taps} taps of hidden size "
            f"{drafter.spec.hidden_size} need {list(expected)}",
            "Use the config.json and the weights of one drafter",
        )


def _check_tensors(
    weights: Weights, expected: Shapes, scope: str = "", ignored: tuple[str, ...] = ()
) -> None:
    """Each expected tensor is there in its shape, and under the prefix `scope` no other: it would
    be silently left out.
    """
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

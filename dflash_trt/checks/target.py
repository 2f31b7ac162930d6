"""Checks of a target alone: its tensors, its tokenizer, what it recommends."""

from dflash_trt.checkpoints.directory import tokenizer_files, tokenizer_split
from dflash_trt.checkpoints.model import NotKnown, Pair
from dflash_trt.checkpoints.shapes import Shapes
from dflash_trt.checkpoints.target import sampling_defaults, target_shapes
from dflash_trt.checkpoints.tiktoken_files import KIMI_PATTERN, RANKS
from dflash_trt.checks.findings import Check, Found, check
from dflash_trt.errors import CheckpointError
from dflash_trt.weights.gguf import LINK, left_out
from dflash_trt.weights.weights import Weights

# of hybrids: layers that predict the token after the next, and the vision tower (transformers
# ignores both in its class for text, `_keys_to_ignore_on_load_unexpected`)
BESIDE = ("mtp.", "model.visual.")


@check("error")
def target_tensors(pair: Pair) -> Found:
    """Check that every tensor is used: an unused one is a missing part of the model."""
    target = pair.target
    # a multimodal model has its decoder in a separate name space
    scope = target.spec.prefix if "language_model" in target.spec.prefix else ""
    names = target.weights.names
    beside = tuple(name for name in names if target.spec.delta_nets and name.startswith(BESIDE))
    fit = tensors_fit(target.weights, target_shapes(target.spec), scope, beside)
    file = target.directory / LINK
    parts = left_out(file) if file.is_file() else []
    if not parts:
        return fit
    return Found(False, f"{fit.what}; left out: {', '.join(parts)}", "Nothing to do", "warning")


@check("error")
def tokenizer(pair: Pair) -> Found:
    """Check that there is a tokenizer, which serving requires."""
    if pair.target.only_config:
        raise NotKnown("of the target only config.json is here")
    tokenizer_files(pair.target.directory)
    what = f"the target's tokenizer has {len(pair.target.tokens)} tokens"
    split = tokenizer_split(pair.target.directory)
    if split and split["pattern"] != KIMI_PATTERN:
        what += f"; {RANKS} is read by another pattern than Kimi's, which alone was compared"
        return Found(False, what, "Compare ids with those of the model's tokenizer", "warning")
    return Found(True, what)


@check("warning")
def sampling_recommended(pair: Pair) -> Found:
    """Check generation_config.json, whose values are defaults of requests."""
    defaults, problem = sampling_defaults(pair.target.directory)
    if problem:
        return Found(False, f"{problem}: the file is ignored", "Correct it")
    stated = ", ".join(f"{name} {value}" for name, value in defaults.items()) or "nothing"
    return Found(True, f"the target recommends {stated}")


@check("error")
def tokenizer_fits(pair: Pair) -> Found:
    """Check that the embedding has a row for every id of the tokenizer."""
    highest = pair.target.highest_token
    size = pair.target.number("vocab_size")
    return Found(
        highest < size,
        f"the target's tokenizer gives ids up to {highest}, its vocabulary has {size}",
        "Use the tokenizer that belongs to this model",
    )


def tensors_fit(
    weights: Weights, expected: Shapes, scope: str = "", ignored: tuple[str, ...] = ()
) -> Found:
    """Check that all expected tensors exist, with their shapes, and no others under `scope`."""
    for name, shape in expected.items():
        if weights.shape(name) != shape:
            raise CheckpointError(
                f"tensor {name} of {weights.directory} is {list(weights.shape(name))}, but its "
                f"config.json asks for {list(shape)}",
                "Use the config.json and the weights of one model",
            )
    used = {*expected, *ignored}
    extra = [name for name in weights.names if name.startswith(scope) and name not in used]
    extra = [name for name in extra if not name.endswith("rotary_emb.inv_freq")]
    if extra:
        raise CheckpointError(
            f"{weights.directory} holds {len(extra)} tensors that this kind of model does not have "
            f"({', '.join(extra[:3])})",
            "Check architectures, num_hidden_layers and attention_bias in its config.json",
        )
    return Found(True, f"all {len(expected)} tensors are there, and no others")


TARGET_CHECKS: list[Check[[Pair]]] = [
    target_tensors,
    tokenizer,
    sampling_recommended,
    tokenizer_fits,
]

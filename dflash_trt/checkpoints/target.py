"""The target: the model whose output distribution is kept."""

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dflash_trt.checkpoints.drafter import is_drafter
from dflash_trt.checkpoints.families import FAMILIES
from dflash_trt.checkpoints.fields import Config
from dflash_trt.checkpoints.files import REQUIRED, open_tokenizer, read_json, special_tokens
from dflash_trt.checkpoints.model import Target, loaded, open_model
from dflash_trt.checkpoints.spec import Shapes, TargetSpec, layer_shapes
from dflash_trt.checkpoints.weights import Weights
from dflash_trt.errors import CheckpointError
from dflash_trt.request_schema import GenerateRequest, first_fault


def load_target(directory: Path) -> Target:
    """Read a Hugging Face directory: config.json, generation_config.json and weight headers.

    Raises CheckpointError for missing or invalid files and unsupported models.
    """
    return loaded(open_target(directory))


def open_target(directory: Path) -> Target:
    """Read a target directory; an unsupported model has a `refusal`."""
    return open_model("target", directory, _read)


def _read(config: Config) -> tuple[TargetSpec, Weights]:
    directory = config.file.parent
    # text_config: in a multimodal model
    config = config.under(config.section("text_config").stated())
    named = config.get("architectures")
    named = named if isinstance(named, list) else []
    known = [name for name in named if isinstance(name, str) and name in FAMILIES]
    if is_drafter(config):
        raise CheckpointError(
            f"the target {directory} is a DFlash drafter",
            "Give a language model as the target; if the two are swapped, swap them back",
        )
    if not known:
        raise config.refuse(f"the architecture is {config.get('architectures')}")
    fields = FAMILIES[known[0]](config)
    weights = Weights(directory, config)
    common: dict[str, Any] = {
        "model_type": str(config.get("model_type", "")),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
        "prefix": _prefix(weights),
        "eos_token_ids": eos_token_ids(directory, fields["vocab_size"]),
    }
    return TargetSpec(**(common | fields)), weights


def _prefix(weights: Weights) -> str:
    """Return the prefix of the decoder's tensors, which depends on the library that saved them."""
    for prefix in ("language_model.model.", "model.language_model."):
        if f"{prefix}embed_tokens.weight" in weights.names:
            return prefix
    return "model."


def target_shapes(spec: TargetSpec) -> Shapes:
    """Return every tensor that the target's graph reads."""
    shapes: Shapes = {
        f"{spec.prefix}embed_tokens.weight": (spec.vocab_size, spec.hidden_size),
        f"{spec.prefix}norm.weight": (spec.hidden_size,),
    }
    if not spec.tie_word_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, spec.hidden_size)
    for i in range(spec.num_hidden_layers):
        shapes |= layer_shapes(spec, i)
    return shapes


def eos_token_ids(directory: Path, vocab_size: int) -> tuple[int, ...]:
    """Return end tokens from every place that transformers or vLLM reads.

    These are generation_config.json, config.json and its text_config, each an id, a list of ids or
    none, and the tokenizer's eos_token. Raises CheckpointError for an invalid token.
    """
    config = Config(directory, read_json(directory / "config.json"))
    ids: list[Any] = []
    for place in (generation_config(directory), config, config.section("text_config")):
        stated = place.get("eos_token_id")
        ids += stated if isinstance(stated, list) else [] if stated is None else [stated]
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise CheckpointError(
                f"{directory}: eos_token_id {token!r} is not a token of the vocabulary",
                "Correct eos_token_id in generation_config.json or config.json",
            )
    if (directory / REQUIRED).is_file() and (named := special_tokens(directory).get("eos_token")):
        end = open_tokenizer(directory).token_to_id(named)
        ids += [end] if end is not None and end < vocab_size else []
    return tuple(dict.fromkeys(ids))


def generation_config(directory: Path) -> dict[str, Any]:
    file = directory / "generation_config.json"
    return read_json(file) if file.is_file() else {}


# fields of generation_config.json, as in vLLM, to request fields
SAMPLING = {
    "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens",
}  # fmt: skip


def sampling_defaults(directory: Path) -> tuple[dict[str, int | float], str]:
    """Return generation_config.json's sampling defaults by request field, and a problem or ""."""
    stated = {name: generation_config(directory).get(key) for key, name in SAMPLING.items()}
    found = {name: value for name, value in stated.items() if value is not None}
    found |= {"top_k": 0} if found.get("top_k") == -1 else {}  # both mean off
    try:
        GenerateRequest.model_validate(found)
    except ValidationError as error:
        return {}, "generation_config.json: {} {}".format(*first_fault(error.errors()))
    return found, ""

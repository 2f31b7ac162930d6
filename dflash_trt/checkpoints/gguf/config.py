"""A GGUF file's metadata as config.json and generation_config.json.

Who reads those checks the numbers; here only what they do not say is looked at.
"""

from typing import Any

from dflash_trt.checkpoints.gguf.header import AGAIN, Header
from dflash_trt.checkpoints.gguf.tensors import ROPE_FREQS
from dflash_trt.checkpoints.stored import Stored
from dflash_trt.errors import CheckpointError

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
NEEDED = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
OPTIONAL = {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
}
OF_HEADS = ("attention.value_length", "rope.dimension_count")  # must be head_dim
SCALING = ("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length")
KNOWN = {*NEEDED, *OPTIONAL, *OF_HEADS, *SCALING, "vocab_size", "rope.scaling.finetuned"}
INSTEAD = "Use another model, or its safetensors"


def config(header: Header) -> dict[str, Any]:
    """config.json; CheckpointError for what is missing or not handled."""
    kind = header.values.get("general.architecture")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise CheckpointError(
            f"{header.file}: the architecture is {kind!r}"[:300]
            + f", and of GGUF only {', '.join(ARCHITECTURES)} are read",
            INSTEAD,
        )
    said = {
        key.removeprefix(f"{kind}."): value
        for key, value in header.values.items()
        if key.startswith(f"{kind}.")
    }
    for key in said.keys() - KNOWN:
        raise CheckpointError(
            f"{header.file}: {kind}.{key} is {said[key]!r}"[:300]
            + ", which dflash-trt does not handle yet",
            INSTEAD,
        )
    for key in NEEDED:
        if key not in said:
            raise CheckpointError(f"{header.file} does not say {kind}.{key}", AGAIN)
    if (table := header.tensors.get("token_embd.weight")) is None:
        raise CheckpointError(f"{header.file} has no tensor token_embd.weight", AGAIN)
    names = NEEDED | OPTIONAL
    found = {names[key]: value for key, value in said.items() if key in names}
    for key in OF_HEADS:
        if key in said and found.setdefault("head_dim", said[key]) != said[key]:
            raise CheckpointError(
                f"{header.file}: {kind}.{key} is {said[key]!r}, heads have {found['head_dim']!r}; "
                "dflash-trt handles no such difference yet"[:300],
                INSTEAD,
            )
    return {
        **found,
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": table.shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "rope_scaling": _scaling(header, said),
    }


def generation_config(header: Header) -> dict[str, Any]:
    """The tokens that end a text, a turn and a message."""
    found = (header.values.get(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot", "eom"))
    return {"eos_token_id": list(dict.fromkeys(token for token in found if token is not None))}


def _scaling(header: Header, said: dict[str, Any]) -> dict[str, Any] | None:
    if (freqs := header.tensors.get(ROPE_FREQS)) is not None:
        # what each frequency of Llama 3.1 is divided by: so do the short factors of LongRoPE
        if freqs.kind != 0 or len(freqs.shape) != 1 or freqs.room < 4 * freqs.shape[0]:
            raise CheckpointError(f"{header.file}: {ROPE_FREQS} is no vector in F32", AGAIN)
        factors = Stored(freqs.name, header.file, freqs.offset, freqs.shape, "F32").read()
        return {
            "rope_type": "longrope",
            "short_factor": factors.tolist(),
            "attention_factor": 1.0,
            "original_max_position_embeddings": said["context_length"],
        }
    kind = said.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    return {
        "rope_type": kind,
        "factor": said.get("rope.scaling.factor"),
        "original_max_position_embeddings": said.get("rope.scaling.original_context_length"),
    }

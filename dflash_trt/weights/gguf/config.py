"""The config.json and generation_config.json that a GGUF file's metadata stand for."""

from typing import Any

from dflash_trt.weights.gguf.header import INSTEAD, Header
from dflash_trt.weights.gguf.tensors import ROPE_FREQS
from dflash_trt.weights.gguf.tokenizer import STATED

ARCHITECTURES = ("llama", "qwen2", "qwen3")
# metadata by field of config.json
FIELDS = {
    "context_length": "max_position_embeddings", "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", "attention.key_length": "head_dim",
    "attention.head_count_kv": "num_key_value_heads", "rope.freq_base": "rope_theta",
}  # fmt: skip
OF_HEADS = ("attention.value_length", "rope.dimension_count")  # must equal head_dim
EPSILON = "attention.layer_norm_rms_epsilon"
KNOWN = {*FIELDS, *OF_HEADS, EPSILON, "vocab_size"}
# as in llama.cpp: the file may name only the base model's end
ENDS_OF_TURNS = {
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>",
    "<end_of_turn>", "<end_of_utterance>", "<EOT>", "[EOT]", "[EOS]", "</s>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
}  # fmt: skip
SAMPLING = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}  # fmt: skip


def config_json(header: Header) -> dict[str, Any]:
    """Return config.json, whose numbers its reader validates; CheckpointError if unsupported."""
    kind = header.values.get("general.architecture")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        what = f"of GGUF {', '.join(ARCHITECTURES)} are read, but the architecture is {kind!r}"
        raise header.wrong(what, INSTEAD)
    stated = {
        key.removeprefix(f"{kind}."): value
        for key, value in header.values.items()
        if key.startswith(f"{kind}.")
    }
    for key in stated.keys() - KNOWN:
        what = f"{kind}.{key} is {stated[key]!r}"[:200]
        raise header.wrong(f"{what}, which dflash-trt does not handle yet", INSTEAD)
    fields = {FIELDS[key]: value for key, value in stated.items() if key in FIELDS}
    for key in OF_HEADS:
        if key in stated and fields.setdefault("head_dim", stated[key]) != stated[key]:
            what = f"{kind}.{key} is {stated[key]!r}, but heads have {fields['head_dim']!r}"
            raise header.wrong(what, INSTEAD)
    *_, rows = header.tensors["token_embd.weight"].shape  # the file has shapes reversed
    scaling = None
    frequencies = header.tensors.get(ROPE_FREQS)
    if frequencies is not None:
        # divisors of Llama 3.1's frequencies, which LongRoPE's short factors express
        scaling = {
            "rope_type": "longrope",
            "short_factor": frequencies.data.tolist(),
            "attention_factor": 1.0,
            "original_max_position_embeddings": stated["context_length"],
        }
    return {
        **fields,
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "model_type": kind,
        "vocab_size": int(rows),
        "rms_norm_eps": stated[EPSILON],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "rope_scaling": scaling,
    }


def generation_config(header: Header) -> dict[str, Any]:
    config = {}
    for key, name in SAMPLING.items():
        value = header.values.get(f"general.sampling.{key}")
        if value is not None:
            config[name] = value
    tokens = header.values[f"{STATED}.tokens"]
    ends = [header.values.get(f"{STATED}.{end}_token_id") for end in ("eos", "eot", "eom")]
    ends += [token for token, text in enumerate(tokens) if text in ENDS_OF_TURNS]
    config["eos_token_id"] = list(dict.fromkeys(end for end in ends if end is not None))
    return config

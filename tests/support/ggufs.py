"""GGUF files, written by llama.cpp's own `gguf` package from tiny models."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

# where in a block of a K quant its float16 scales are: `gguf` reads these but does not write them
SCALES = {Kind.Q2_K: (80, 84), Kind.Q3_K: (108, 110), Kind.Q4_K: (0, 4), Kind.Q5_K: (0, 4)}
SCALES |= {Kind.Q6_K: (208, 210), Kind.IQ4_XS: (0, 2), Kind.IQ2_XXS: (0, 2)}
TEXTS = [path.read_text() for path in sorted(Path(__file__).parents[2].glob("docs/*.md"))[:4]]


def vocabulary(size: int) -> tuple[list[str], list[str]]:
    """Return tokens, the last two special, and merges learned from our pages."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size - 2, initial_alphabet=alphabet, show_progress=False
    )
    trained.train_from_iterator(TEXTS, trainer)
    ids = trained.get_vocab()
    assert len(ids) == size - 2
    merges = json.loads(trained.to_str())["model"]["merges"]
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in merges]
    return [*sorted(ids, key=ids.__getitem__), "<|end|>", "<|mask|>"], merges


def write(
    file: Path,
    target: Path,
    kind: Kind = Kind.F32,
    *,
    pre: str = "smollm",
    more: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray[Any, Any]] | None = None,
    seed: int = 0,
) -> Path:
    """Write a Hugging Face target of Llama or Qwen as llama.cpp's converter does.

    kind: of matrices; K quants are random blocks. more: metadata; tensors: added ones.
    """
    config = json.loads((target / "config.json").read_text())
    name = config["model_type"]
    writer = gguf.GGUFWriter(file, name)
    heads, shared = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(shared)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base((config.get("rope_parameters") or config)["rope_theta"])
    tokens, merges = vocabulary(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_merges(merges)
    writer.add_token_types([1] * (len(tokens) - 2) + [3, 3])
    writer.add_eos_token_id(len(tokens) - 2)
    writer.add_bos_token_id(len(tokens) - 1)
    writer.add_add_bos_token(False)
    writer.add_chat_template(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
    )
    for key, value in (more or {}).items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[name.upper()], config["num_hidden_layers"])
    chance = np.random.default_rng(seed)
    for tensor, values in sorted(load_file(target / "model.safetensors").items()):
        found = names.get_name(tensor, try_suffixes=(".weight", ".bias"))
        if name == "llama" and tensor.endswith(("q_proj.weight", "k_proj.weight")):
            turned = heads if "q_proj" in tensor else shared
            halves = values.reshape(turned, 2, -1, values.shape[1])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        if values.ndim == 1 or kind == Kind.F32:
            writer.add_tensor(found, np.ascontiguousarray(values, np.float32))
        elif kind in SCALES:
            writer.add_tensor(found, _blocks(kind, values.shape, chance), raw_dtype=kind)
        else:
            writer.add_tensor(found, gguf.quants.quantize(values, kind), raw_dtype=kind)
    for tensor, values in (tensors or {}).items():
        writer.add_tensor(tensor, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _blocks(kind: Kind, shape: tuple[int, ...], chance: np.random.Generator) -> Any:
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = chance.integers(0, 256, (shape[0], shape[1] // numbers, size), np.uint8)
    start, end = SCALES[kind]
    scales = chance.uniform(1e-5, 1e-4, (*blocks.shape[:2], (end - start) // 2))
    blocks[..., start:end] = scales.astype(np.float16).view(np.uint8)
    return blocks.reshape(shape[0], -1)

"""GGUF files, written by llama.cpp's own `gguf` package from tiny models.

What its converter changes is changed here by our own words; each family was compared once with
what the converter itself writes.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from dflash_trt.checkpoints import load_target

Array = np.ndarray[Any, Any]
Tensors = dict[str, Array]

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
    tensors: Mapping[str, Array] | None = None,
    seed: int = 0,
    parts: int = 0,
    without: tuple[str, ...] = (),
    fused: bool = False,
) -> Path:
    """Write a Hugging Face target as llama.cpp's converter does; returns the first part's path.

    kind: of matrices; K quants are random blocks. more: metadata, None leaves out; tensors: added
    ones; without: ends of names that are left out. parts: in so many files. fused: queries, keys
    and values of a layer in one tensor.
    """
    config = json.loads((target / "config.json").read_text())
    name = ARCHITECTURES.get(config["model_type"], config["model_type"])
    stored = {
        tensor: values
        for tensor, values in _converted(kept_order(target), config).items()
        if not tensor.endswith(without)
    }
    stored = _with_fused_attention(stored) if fused else stored
    most = -(-len(stored | dict(tensors or {})) // parts) if parts else 0
    writer = gguf.GGUFWriter(file, name, split_max_tensors=most)
    stated = {f"{name}.{key}": value for key, value in _metadata(config).items()}
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
    for key, value in (stated | dict(more or {})).items():
        if value is not None:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    architecture = {known: number for number, known in gguf.MODEL_ARCH_NAMES.items()}[name]
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    chance = np.random.default_rng(seed)
    for tensor, values in sorted(stored.items()):
        found = names.get_name(tensor, try_suffixes=(".weight", ".bias")) or tensor
        in_blocks = values.ndim > 1 and values.shape[-1] % 32 == 0 and found.endswith("weight")
        in_blocks = in_blocks and "gate_inp" not in found  # nor does llama.cpp quantize these
        if not in_blocks or kind == Kind.F32:
            writer.add_tensor(found, np.ascontiguousarray(values, np.float32))
        elif kind in SCALES:
            writer.add_tensor(found, _blocks(kind, values.shape, chance), raw_dtype=kind)
        else:
            blocks = gguf.quants.quantize(np.ascontiguousarray(values), kind)
            writer.add_tensor(found, blocks, raw_dtype=kind)
    for tensor, values in (tensors or {}).items():
        writer.add_tensor(tensor, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return next(file.parent.glob(f"{file.stem}-00001-of-*")) if parts else file


# GGUF's names of architectures, by model_type
ARCHITECTURES = {
    "mistral": "mistral3", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss", "gemma3_text": "gemma3",
    "gemma4_text": "gemma4", "qwen3_next": "qwen3next", "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
}  # fmt: skip
HYBRIDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
SHIFTED = ("gemma2", "gemma3_text", *HYBRIDS)  # norms are stored with 1 added
# metadata by field of config.json
FIELDS = {
    "max_position_embeddings": "context_length", "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count", "rms_norm_eps":
    "attention.layer_norm_rms_epsilon", "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "num_key_value_heads": "attention.head_count_kv", "num_experts": "expert_count",
    "num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "linear_num_key_heads": "ssm.group_count", "linear_num_value_heads": "ssm.time_step_rank",
    "linear_key_head_dim": "ssm.state_size", "linear_conv_kernel_dim": "ssm.conv_kernel",
}  # fmt: skip
YARN = {
    "factor": "factor", "original_max_position_embeddings": "original_context_length",
    "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow",
}  # fmt: skip


def _metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the converter says of a model, None for nothing."""
    kind = config["model_type"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    stated = {FIELDS[name]: value for name, value in config.items() if name in FIELDS}
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        stated[key] = head_dim
    ropes = config.get("rope_parameters") or config
    whole = ropes.get("full_attention", ropes)
    stated["rope.freq_base"] = whole["rope_theta"]
    if "sliding_attention" in ropes:
        stated["rope.freq_base_swa"] = ropes["sliding_attention"]["rope_theta"]
    if whole.get("rope_type") in ("linear", "yarn"):
        stated["rope.scaling.type"] = whole["rope_type"]
        for name, key in YARN.items():
            stated[f"rope.scaling.{key}"] = whole.get(name)
    if kind.startswith("gemma") or kind == "gpt_oss":
        stated["attention.sliding_window"] = config["sliding_window"]
    if kind == "gpt_oss":
        stated["expert_feed_forward_length"] = config["intermediate_size"]
    if kind == "gemma4_text":
        stated |= _gemma4_metadata(config)
    if kind in HYBRIDS:
        linear = [name == "linear_attention" for name in config["layer_types"]]
        values = config["linear_value_head_dim"] * config["linear_num_value_heads"]
        stated |= {"ssm.inner_size": values, "attention.recurrent_layers": linear}
        stated["rope.dimension_count"] = int(head_dim * ropes["partial_rotary_factor"])
    if kind in HYBRIDS[1:]:
        stated["rope.dimension_sections"] = [11, 11, 10, 0]
    return stated


def _gemma4_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    sliding = [name == "sliding_attention" for name in config["layer_types"]]
    kv_heads = config["num_key_value_heads"]
    layers = config.get("per_layer_config") or {}
    wide = [dict(layers.get(str(i), {})) for i in range(len(sliding))]
    head_dims = [fields.get("head_dim", config["head_dim"]) for fields in wide]
    stated: dict[str, Any] = {
        "attention.sliding_window_pattern": sliding,
        "attention.head_count_kv": [fields.get("num_key_value_heads", kv_heads) for fields in wide],
        "attention.shared_kv_layers": 0,
        "embedding_length_per_layer_input": 0,
    }
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        stated[key] = max(head_dims)
        stated[f"{key}_swa"] = min(head_dims)
    return stated


def kept_order(target: Path) -> Tensors:
    """Return a checkpoint's tensors, Gated DeltaNets' in the order that our reader keeps.

    Qwen3-Next's projections are by kind instead of by key head. Qwen3.5's value heads are tiled:
    the first of each key head, then the second of each.
    """
    model = load_target(target)
    tensors = {name: model.weights.read(name) for name in model.weights.names}
    net = next(iter(model.spec.delta_nets), None)
    if net is None:
        return tensors
    shared = net.num_value_heads // net.num_key_heads
    ordered: Tensors = {}
    for name, values in tensors.items():
        prefix, _, last = name.rpartition("linear_attn.")
        width = values.shape[-1]
        by_head = values.reshape(net.num_key_heads, -1, width) if "in_proj" in last else values
        if not prefix:
            ordered[name] = values
        elif last == "in_proj_qkvz.weight":
            sizes = np.cumsum([net.key_dim, net.key_dim, shared * net.value_dim])
            *qkv, z = (part.reshape(-1, width) for part in np.split(by_head, sizes, axis=1))
            ordered[f"{prefix}linear_attn.in_proj_qkv.weight"] = np.concatenate(qkv)
            ordered[f"{prefix}linear_attn.in_proj_z.weight"] = z
        elif last == "in_proj_ba.weight":
            b, a = np.split(by_head, 2, axis=1)
            ordered[f"{prefix}linear_attn.in_proj_b.weight"] = b.reshape(-1, width)
            ordered[f"{prefix}linear_attn.in_proj_a.weight"] = a.reshape(-1, width)
        elif net.grouped or last == "norm.weight":
            ordered[name] = values
        elif last == "out_proj.weight":
            ordered[name] = _tiled(values.T, net.num_key_heads, shared, 0).T
        else:
            first = 2 * net.keys if last in ("in_proj_qkv.weight", "conv1d.weight") else 0
            ordered[name] = _tiled(values, net.num_key_heads, shared, first)
    return ordered


def _tiled(values: Array, key_heads: int, shared: int, first: int) -> Array:
    """Put rows from `first` on into the order of tiled value heads."""
    heads = values[first:].reshape(key_heads, shared, -1, *values.shape[1:])
    return np.concatenate([values[:first], heads.swapaxes(0, 1).reshape(-1, *values.shape[1:])])


def _converted(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """Change tensors as the converter does, by Hugging Face name or where it has none by GGUF's."""
    kind = config["model_type"]
    changed: Tensors = {}
    experts: dict[str, dict[int, Array]] = {}
    for name, values in tensors.items():
        prefix, _, last = name.rpartition(".linear_attn.")
        layer = prefix.removeprefix("model.layers.")
        expert = re.fullmatch(r"(.+\.experts)\.(\d+)\.(.+)", name)
        if expert:
            experts.setdefault(f"{expert[1]}.{expert[3]}", {})[int(expert[2])] = values
        elif last == "A_log":
            changed[name] = -np.exp(values)
        elif last == "dt_bias":
            changed[f"{prefix}.linear_attn.dt_proj.bias"] = values
        elif last == "conv1d.weight":
            changed[name] = values[:, 0]
        elif prefix and kind == "qwen3_next" and last in ("in_proj_qkv.weight", "in_proj_z.weight"):
            changed[f"blk.{layer}.attn_{'qkv' if 'qkv' in last else 'gate'}.weight"] = values
        elif prefix and kind == "qwen3_next" and last == "in_proj_b.weight":
            both = [values, tensors[name.replace("in_proj_b", "in_proj_a")]]
            heads = config["linear_num_key_heads"]
            by_head = [rows.reshape(heads, -1, rows.shape[1]) for rows in both]
            together = np.concatenate(by_head, axis=1).reshape(-1, values.shape[1])
            changed[f"blk.{layer}.ssm_ba.weight"] = together
        elif prefix and kind == "qwen3_next" and last == "in_proj_a.weight":
            continue
        elif name.endswith("norm.weight") and last != "norm.weight" and kind in SHIFTED:
            changed[name] = values + np.float32(1)
        elif kind in ("llama", "mistral") and name.endswith(("q_proj.weight", "k_proj.weight")):
            part = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
            halves = values.reshape(config[part], 2, -1, values.shape[1])
            changed[name] = halves.swapaxes(1, 2).reshape(values.shape)
        elif ".experts." in name:  # gpt-oss'
            changed |= _separated(name, values)
        elif name.endswith(("sinks", "layer_scalar")):
            changed[f"{name}.weight"] = values
        else:
            changed[name] = values
    for name, matrices in experts.items():
        changed[name] = np.stack([matrices[i] for i in range(len(matrices))])
    if kind == "gemma4_text":
        whole = config["rope_parameters"]["full_attention"]
        count = max(int(head_dim) for head_dim in _head_dims(config)) // 2
        rotated = int(count * whole["partial_rotary_factor"])
        divisors = [1.0] * rotated + [1e30] * (count - rotated)
        changed["rope_freqs.weight"] = np.array(divisors, np.float32)
    return changed


def _with_fused_attention(tensors: Tensors) -> Tensors:
    fused = dict(tensors)
    for name in tensors:
        projection = re.fullmatch(r"model\.layers\.(\d+)\.self_attn\.q_proj\.(weight|bias)", name)
        if projection is None:
            continue
        names = [name.replace("q_proj", f"{part}_proj") for part in "qkv"]
        if fused.keys() >= set(names):
            layer, kind = projection.groups()
            rows = np.concatenate([fused.pop(part) for part in names])
            fused[f"blk.{layer}.attn_qkv.{kind}"] = rows
    return fused


def _head_dims(config: Mapping[str, Any]) -> list[int]:
    layers = (config.get("per_layer_config") or {}).values()
    return [config["head_dim"], *(fields.get("head_dim", 0) for fields in layers)]


def _separated(name: str, values: Array) -> Tensors:
    """Return gpt-oss' experts `[experts, out, in]`, or biases, with gate and up apart."""
    suffix = "bias" if name.endswith("_bias") else "weight"
    values = values if suffix == "bias" else values.swapaxes(1, 2)
    plain = name.removesuffix("_bias")
    if not plain.endswith("gate_up_proj"):
        return {f"{plain}.{suffix}": values}
    prefix = plain.removesuffix("gate_up_proj")
    return {
        f"{prefix}gate_proj.{suffix}": values[:, ::2],
        f"{prefix}up_proj.{suffix}": values[:, 1::2],
    }


def _blocks(kind: Kind, shape: tuple[int, ...], chance: np.random.Generator) -> Any:
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = chance.integers(0, 256, (shape[0], shape[1] // numbers, size), np.uint8)
    start, end = SCALES[kind]
    scales = chance.uniform(1e-5, 1e-4, (*blocks.shape[:2], (end - start) // 2))
    blocks[..., start:end] = scales.astype(np.float16).view(np.uint8)
    return blocks.reshape(shape[0], -1)

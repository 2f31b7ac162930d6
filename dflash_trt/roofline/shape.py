"""How large a model is, layer by layer, from its config.json alone.

It needs no weights, and takes models that the graphs refuse too: mixtures of experts, hybrids with
linear attention (Qwen3-Next, Qwen3.5), latent attention (DeepSeek, Kimi). Norms and biases are left
out: under one part in a thousand.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from typing import Any

from dflash_trt.errors import CheckpointError

MOST_LAYERS = 1024  # of published models a tenth
Values = Mapping[str, Any]  # config.json, flat (checkpoints.config_values)


@dataclass(frozen=True)
class Format:
    """How a matrix is stored."""

    name: str
    bytes: float  # of a parameter, its share of a scale included
    multiplied: str  # the type of Gpu.flops


BF16 = Format("bf16", 2, "bf16")  # float16 and, as TensorRT-LLM loads it, float32 too
FP8 = Format("fp8", 1, "fp8")
MXFP4 = Format("mxfp4", 0.5 + 1 / 32, "fp8")  # by MXFP8 activations
NVFP4 = Format("nvfp4", 0.5 + 1 / 16, "fp4")


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One decoder layer. Counts are parameters, or numbers of a cache."""

    attention: int  # its matrices, of linear attention too
    attention_format: Format
    query: int  # heads * head_dim: what a position of the context is multiplied with
    kv_heads: int  # how many GPUs can share the cache
    cached: int  # for each token, all heads together
    state: int = 0  # for each sequence, however long (linear attention)
    window: int | None = None
    mlp: int = 0  # what every token passes: the MLP, shared experts, the router
    mlp_format: Format = BF16
    experts: int = 0
    chosen: int = 0  # by each token
    expert: int = 0  # one of them
    expert_format: Format = BF16

    def parts(self) -> list[tuple[int, Format]]:
        """All of its parameters."""
        return [
            (self.attention, self.attention_format),
            (self.mlp, self.mlp_format),
            (self.experts * self.expert, self.expert_format),
        ]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A target or a drafter."""

    layers: tuple[Layer, ...]
    hidden: int
    vocab: int
    tables: int  # vocab x hidden matrices: 1 where head and embedding are tied, 0 for a drafter
    other: int = 0  # parameters outside of layers and tables: a drafter's fc
    estimated: tuple[str, ...] = ()  # what the config does not say, and what was taken

    @cached_property
    def kinds(self) -> Mapping[Layer, int]:
        """Layers that are alike, and how many there are."""
        return Counter(self.layers)

    @property
    def parameters(self) -> int:
        layers = sum(count for layer in self.layers for count, _ in layer.parts())
        return layers + self.tables * self.head + self.other

    @property
    def weight_bytes(self) -> float:
        """Of all GPUs together; tables and fc are never quantised."""
        layers = sum(n * kind.bytes for layer in self.layers for n, kind in layer.parts())
        return layers + 2 * (self.tables * self.head + self.other)

    @property
    def head(self) -> int:
        """Parameters of the output head."""
        return self.vocab * self.hidden


def target_shape(values: Values) -> Shape:
    """CheckpointError when the config does not even say the basic sizes."""
    return _shape(values, "target", tables=1 if values.get("tie_word_embeddings") else 2, other=0)


def drafter_shape(values: Values, target: Shape) -> Shape:
    """`fc` takes the tap features; embedding and head are the target's."""
    taps = _list(values, "target_layer_ids") or _list(values, "aux_hidden_state_layer_ids")
    hidden, vocab = _number(values, "hidden_size", "drafter"), target.vocab
    other = hidden * (len(taps) or 5) * target.hidden
    if group := _int(values, "conv_group_size"):  # DFlash 2: two convolutions a layer, pair scores
        size = _int(values, "conv_kernel_size") or 2
        layers = _number(values, "num_hidden_layers", "drafter")
        other += layers * 2 * 2 * size * (hidden // group) * hidden
        other += (_int(values, "selector_rank") or 0) * (hidden + 2 * vocab)
    return _shape({"vocab_size": vocab, **values}, "drafter", tables=0, other=other)


def eagle_shape(target: Shape) -> Shape:
    """The usual EAGLE-3 drafter of a target: one dense Llama layer with twice as wide an input.

    Its MLP is four times as wide as the model, its head has 32,000 tokens.
    """
    hidden = target.hidden
    layer = Layer(
        attention=2 * hidden * (hidden + hidden // 2) + hidden * hidden,
        attention_format=BF16,
        query=hidden,
        kv_heads=8,
        cached=hidden // 2,
        mlp=3 * hidden * 4 * hidden,
    )
    return Shape(layers=(layer,), hidden=hidden, vocab=32000, tables=1, other=3 * hidden * hidden)


def _shape(values: Values, role: str, *, tables: int, other: int) -> Shape:
    count = min(_number(values, "num_hidden_layers", role), MOST_LAYERS)
    estimated: list[str] = []
    layers = tuple(_layer(values, role, index, estimated) for index in range(count))
    return Shape(
        layers=layers,
        hidden=_number(values, "hidden_size", role),
        vocab=_number(values, "vocab_size", role),
        tables=tables,
        other=other,
        estimated=tuple(dict.fromkeys(estimated)),
    )


def _layer(values: Values, role: str, index: int, estimated: list[str]) -> Layer:
    kind = _kind(values, index, estimated)
    # where a layer is not as the rest; transformers 5 pads the numbers: "05"
    if own := section(values, "per_layer_config"):
        padded = str(index).zfill(max(map(len, own)))
        values = {**values, **section(own, str(index)), **section(own, padded)}
    attention: dict[str, Any] = (
        _linear(values)
        if kind in ("linear_attention", "conv", "mamba")
        else _latent(values, role)
        if values.get("kv_lora_rank")
        else _grouped(values, role, kind)
    )
    if kind not in ("full_attention", "sliding_attention", "linear_attention"):
        estimated.append(f"layers of type {kind} are counted as linear attention or full attention")
    module = "linear_attn.in_proj_qkv" if kind == "linear_attention" else "self_attn.q_proj"
    return Layer(
        **attention,
        attention_format=_format(values, f"model.layers.{index}.{module}", estimated),
        window=_int(values, "sliding_window") if kind == "sliding_attention" else None,
        **_mlp(values, role, index, estimated),
    )


def _kind(values: Values, index: int, estimated: list[str]) -> str:
    kinds = _list(values, "layer_types")
    if index < len(kinds):
        return str(kinds[index])
    if every := _int(values, "full_attention_interval"):
        return "full_attention" if (index + 1) % every == 0 else "linear_attention"
    if values.get("model_type") == "gpt_oss":
        return "full_attention" if index % 2 else "sliding_attention"
    if pattern := _int(values, "sliding_window_pattern"):
        return "full_attention" if (index + 1) % pattern == 0 else "sliding_attention"
    if linear := section(values, "linear_attn_config"):  # Kimi-Linear counts its layers from 1
        full = _list(linear, "full_attn_layers")
        return "full_attention" if index + 1 in full else "linear_attention"
    if _int(values, "sliding_window") and values.get("use_sliding_window", True):
        estimated.append("layer_types are not stated: every layer is counted as full attention")
    return "full_attention"


def _grouped(values: Values, role: str, kind: str) -> dict[str, int]:
    """Attention whose heads share keys and values in groups."""
    hidden = _number(values, "hidden_size", role)
    heads = _number(values, "num_attention_heads", role)
    kv_heads = _int(values, "num_key_value_heads") or heads
    head_dim = _int(values, "head_dim") or hidden // heads
    both = 2  # keys and values
    if kind == "full_attention" and values.get("attention_k_eq_v"):  # Gemma 4
        kv_heads, both = _int(values, "num_global_key_value_heads") or kv_heads, 1
    if kind == "full_attention":
        head_dim = _int(values, "global_head_dim") or head_dim
    query, cached = heads * head_dim, 2 * kv_heads * head_dim
    gate = query if values.get("attn_output_gate") or _is_qwen_next(values) else 0
    return {
        "attention": hidden * (query + gate + both * kv_heads * head_dim + query),
        "query": query,
        "kv_heads": kv_heads,
        "cached": cached,
    }


def _is_qwen_next(values: Values) -> bool:
    """Qwen3-Next and Qwen3.5 gate the output of attention and do not say so."""
    return "linear_num_value_heads" in values and "attn_output_gate" not in values


def _latent(values: Values, role: str) -> dict[str, int]:
    """DeepSeek's MLA: one compressed row a token, which every GPU holds."""
    hidden = _number(values, "hidden_size", role)
    heads = _number(values, "num_attention_heads", role)
    rank, rope = _number(values, "kv_lora_rank", role), _number(values, "qk_rope_head_dim", role)
    plain, value = _number(values, "qk_nope_head_dim", role), _number(values, "v_head_dim", role)
    query = heads * (plain + rope)
    low = _int(values, "q_lora_rank")
    through = hidden * low + low * query if low else hidden * query
    return {
        "attention": through
        + hidden * (rank + rope)
        + rank * heads * (plain + value)
        + heads * value * hidden,
        "query": heads * (rank + rope),  # decoding multiplies in the compressed space
        "kv_heads": 1,
        "cached": rank + rope,
    }


def _linear(values: Values) -> dict[str, int]:
    """Gated delta rule (Qwen3-Next); its state is float32, counted as two numbers each."""
    hidden = _number(values, "hidden_size", "target")
    config = section(values, "linear_attn_config")
    heads = _int(values, "linear_num_value_heads") or _int(config, "num_heads") or 0
    key_heads = _int(values, "linear_num_key_heads") or heads
    head_dim = _int(config, "head_dim") or 128
    key = _int(values, "linear_key_head_dim") or head_dim
    value = _int(values, "linear_value_head_dim") or head_dim
    keys, both = key_heads * key, heads * value
    conv_width = 2 * keys + both
    conv = _int(values, "linear_conv_kernel_dim") or _int(config, "short_conv_kernel_size") or 4
    return {
        # q, k, v, the output's gate, the two gates of the state, the convolution, the way out
        "attention": hidden * (2 * keys + 3 * both + 2 * heads) + conv * conv_width,
        "query": 0,
        "kv_heads": max(heads, 1),
        "cached": 0,
        "state": 2 * heads * key * value + (conv - 1) * conv_width,
    }


def _mlp(values: Values, role: str, index: int, estimated: list[str]) -> dict[str, Any]:
    hidden = _number(values, "hidden_size", role)
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    count = next((n for name in names if (n := _int(values, name))), 0)
    place = f"model.layers.{index}.mlp"
    dense = {
        "mlp": 3 * hidden * _number(values, "intermediate_size", role, 0),
        "mlp_format": _format(values, f"{place}.gate_proj", estimated),
    }
    plain = (
        index < (_int(values, "first_k_dense_replace") or 0)
        or index in _list(values, "mlp_only_layers")
        or (index + 1) % (_int(values, "decoder_sparse_step") or 1)
    )
    if not count or plain or values.get("enable_moe_block") is False:
        return dense
    wide = _int(values, "moe_intermediate_size") or _number(values, "intermediate_size", role)
    shared = _int(values, "shared_expert_intermediate_size") or wide * (
        _int(values, "n_shared_experts") or 0
    )
    if values.get("enable_moe_block"):  # Gemma 4: the MLP beside the experts
        shared = _number(values, "intermediate_size", role)
    chosen = _int(values, "num_experts_per_tok") or _int(values, "top_k_experts") or 1
    name = f"{place}.shared_expert{'s' if values.get('n_shared_experts') else ''}.gate_proj"
    return {
        "mlp": 3 * hidden * shared + hidden * count,
        "mlp_format": _format(values, name, estimated),
        "experts": count,
        "chosen": min(chosen, count),
        "expert": 3 * hidden * wide,
        "expert_format": _format(values, f"{place}.experts.0.gate_proj", estimated, expert=True),
    }


def _format(values: Values, module: str, estimated: list[str], *, expert: bool = False) -> Format:
    """How a module's matrices are stored; `quantization_config` as published models have it."""
    quant = section(values, "quantization_config")
    if not quant:
        return BF16
    lists = ("modules_to_not_convert", "ignore", "exclude_modules")
    left_out = [pattern for name in lists for pattern in _list(quant, name)]
    if any(_names(str(pattern), module) for pattern in left_out):
        return BF16
    method, algorithm = quant.get("quant_method"), quant.get("quant_algo")
    if listed := section(quant, "quantized_layers"):
        found = [name for name in listed if _names(name, module)]
        if not found:
            return BF16
        algorithm = section(listed, found[0]).get("quant_algo")
    if method == "mxfp4":
        return MXFP4 if expert else BF16
    if method == "fp8" or algorithm == "FP8":
        return FP8
    groups = section(quant, "config_groups")
    weights = section(section(groups, next(iter(groups), "")), "weights")
    bits, kind = weights.get("num_bits"), weights.get("type")
    if algorithm == "NVFP4" or (bits == 4 and kind == "float"):
        return NVFP4
    if bits == 8 and kind == "float":
        return FP8
    if bits == 4 and kind == "int":  # Kimi-K2 Thinking and K2.5: multiplied in bf16
        return Format("int4", 0.5 + 2 / (_int(weights, "group_size") or 128), "bf16")
    estimated.append(f"weights quantised by {method} {algorithm or ''} are counted as bf16")
    return BF16


def _names(pattern: str, module: str) -> bool:
    """Whether an entry of a list of modules means this one; prefixes before `layers` may differ."""
    if pattern.startswith("re:"):
        return re.search(pattern[3:], module) is not None
    pattern, module = (re.sub(r"^.*?layers\.", "layers.", text) for text in (pattern, module))
    return fnmatch(module, pattern) or fnmatch(module, f"{pattern}.*")


def section(values: Values, name: str) -> dict[str, Any]:
    """An object in a config; {} for anything else."""
    value = values.get(name)
    return value if isinstance(value, dict) else {}


def _list(values: Values, name: str) -> list[Any]:
    value = values.get(name)
    return value if isinstance(value, list) else []


def _int(values: Values, name: str) -> int | None:
    value = values.get(name)
    return value if type(value) is int and 0 < value < 1 << 40 else None


def _number(values: Values, name: str, role: str, default: int | None = None) -> int:
    found = _int(values, name)
    if found is None and default is None:
        raise CheckpointError(
            f"the config.json of the {role} states no {name}", "Take the one that came with it"
        )
    return found if found is not None else default or 0

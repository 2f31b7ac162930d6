"""Size of a model, layer by layer, from its config.json alone.

Needs no weights, and supports models that the graphs refuse: mixtures of experts, hybrids with
linear attention (Qwen3-Next, Qwen3.5), latent attention (DeepSeek, Kimi). Norms and biases are
ignored: under one part in a thousand. Layers of unknown types count as full attention, unknown
formats as bf16.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cached_property
from typing import Any, NamedTuple

from dflash_trt.errors import CheckpointError

MAX_LAYERS = 1024  # ten times that of any published model
# as `engines.most_verified`: a round verifies at most 16 tokens of a sequence, unless its drafter's
# blocks are longer
MOST_DRAFTS = 15
Values = Mapping[str, Any]  # flat config.json (checkpoints.model.flat)


class Format(NamedTuple):
    name: str
    bytes: float  # per parameter, including its share of a scale
    multiplied: str  # a type of Flops


BF16 = Format("bf16", 2, "bf16")  # also float16 and, as TensorRT-LLM loads it, float32
FP8 = Format("fp8", 1, "fp8")
MXFP4 = Format("mxfp4", 0.5 + 1 / 32, "fp8")  # activations are MXFP8
NVFP4 = Format("nvfp4", 0.5 + 1 / 16, "fp4")


@dataclass(frozen=True, kw_only=True)
class Recurrent:
    """Numbers that linear attention keeps of a sequence of any length."""

    matrices: int  # its state
    channels: int  # of the convolution
    window: int  # inputs before the next token that the convolution reads
    draft: int  # what a draft left for when it is accepted: key, value and two gates

    def bytes_in_slot(self, drafts: int) -> int:
        """Return the bytes of a sequence in our engines, where all is float32."""
        return 4 * (self.matrices + (self.window + drafts) * self.channels + drafts * self.draft)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One decoder layer. Counts are parameters, or numbers in a cache."""

    attention: int  # its matrices, including linear attention
    attention_format: Format = BF16
    query: int  # heads * head_dim: products per position of the context
    kv_heads: int  # GPUs that can divide the cache
    cached: int  # per token, all heads
    recurrent: Recurrent | None = None  # linear attention
    window: int | None = None
    mlp: int = 0  # used by every token: the MLP, shared experts, the router
    mlp_format: Format = BF16
    experts: int = 0
    chosen: int = 0  # per token
    expert: int = 0  # parameters of one
    expert_format: Format = BF16

    @property
    def state(self) -> int:
        """Numbers of 16 bits per sequence of any length: a float32 counts as two."""
        recurrent = self.recurrent
        if recurrent is None:
            return 0
        return 2 * recurrent.matrices + recurrent.window * recurrent.channels

    def parameters_by_format(self) -> list[tuple[int, Format]]:
        return [
            (self.attention, self.attention_format),
            (self.mlp, self.mlp_format),
            (self.experts * self.expert, self.expert_format),
        ]


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    layers: tuple[Layer, ...]
    hidden: int
    vocab: int
    tables: int  # vocab x hidden matrices: 1 if head and embedding are tied, 0 for a drafter
    other: int = 0  # parameters outside layers and tables: a drafter's fc

    @cached_property
    def kinds(self) -> Mapping[Layer, int]:
        return Counter(self.layers)

    @property
    def parameters(self) -> int:
        layers = sum(n for layer in self.layers for n, _ in layer.parameters_by_format())
        return layers + self.tables * self.head_size + self.other

    @property
    def weight_bytes(self) -> float:
        """Bytes on all GPUs; tables and fc are never quantized."""
        parts = (part for layer in self.layers for part in layer.parameters_by_format())
        unquantized = self.tables * self.head_size + self.other
        return sum(count * kind.bytes for count, kind in parts) + 2 * unquantized

    @property
    def head_size(self) -> int:
        return self.vocab * self.hidden


def target_size(values: Values) -> ModelSize:
    """Return the target's size; CheckpointError if the config lacks basic sizes."""
    tables = 1 if values.get("tie_word_embeddings") else 2
    return _Reader(values, "target").size(tables=tables)


def drafter_size(values: Values, target: ModelSize) -> ModelSize:
    """Return the drafter's size; embedding and head are the target's."""
    config = _Reader({"vocab_size": target.vocab, **values}, "drafter")
    hidden = config.required("hidden_size")
    other = hidden * feature_size(values, target)
    group = config.number("conv_group_size")
    if group:  # DFlash 2: two convolutions a layer, pair scores
        kernel = config.number("conv_kernel_size", 2)
        layers = config.required("num_hidden_layers")
        other += layers * 2 * 2 * kernel * (hidden // group) * hidden
        other += config.number("selector_rank") * (hidden + 2 * target.vocab)
    return config.size(tables=0, other=other)


def feature_size(values: Values, target: ModelSize) -> int:
    """Return the numbers of a token's features, which a drafter reads; values: of the drafter."""
    config = _Reader(values, "drafter")
    taps = config.entries("target_layer_ids") or config.entries("aux_hidden_state_layer_ids")
    return (len(taps) or 5) * target.hidden


def state_bytes(model: ModelSize) -> dict[str, int] | None:
    """Return what a hybrid's states take in our engines: `slot` of a sequence, `kept` after it."""
    states = [layer.recurrent for layer in model.layers if layer.recurrent is not None]
    if not states:
        return None
    return {
        "slot": sum(state.bytes_in_slot(MOST_DRAFTS) for state in states),
        "kept": sum(state.bytes_in_slot(0) for state in states),
    }


def section(values: Values, name: str) -> dict[str, Any]:
    """Return an object in a config; {} for anything else."""
    value = values.get(name)
    return value if isinstance(value, dict) else {}


class _Reader:
    def __init__(self, values: Values, role: str) -> None:
        self.values = values
        self.role = role

    def number(self, name: str, default: int = 0) -> int:
        """Return a size; `default` if missing or invalid."""
        value = self.values.get(name)
        return value if type(value) is int and 0 < value < 1 << 40 else default

    def required(self, name: str) -> int:
        value = self.number(name)
        if not value:
            raise CheckpointError(
                f"the config.json of the {self.role} states no {name}",
                "Take the one that came with it",
            )
        return value

    def entries(self, name: str) -> list[Any]:
        value = self.values.get(name)
        return value if isinstance(value, list) else []

    def object_in(self, name: str) -> "_Reader":
        return _Reader(section(self.values, name), self.role)

    def size(self, *, tables: int, other: int = 0) -> ModelSize:
        count = min(self.required("num_hidden_layers"), MAX_LAYERS)
        return ModelSize(
            layers=tuple(self._layer(index) for index in range(count)),
            hidden=self.required("hidden_size"),
            vocab=self.required("vocab_size"),
            tables=tables,
            other=other,
        )

    def _layer(self, index: int) -> Layer:
        kind = self._layer_type(index)
        config = self._of_layer(index)
        module = "self_attn.q_proj"
        if kind == "linear_attention":
            layer = config._linear()
            module = "linear_attn.in_proj_qkv"
        elif self.values.get("kv_lora_rank"):
            layer = config._latent()
        else:
            layer = config._grouped(kind)
        window = config.number("sliding_window") if kind == "sliding_attention" else 0
        return replace(
            layer,
            attention_format=self._format(f"model.layers.{index}.{module}"),
            window=window or None,
            **config._mlp_fields(index),
        )

    def _layer_type(self, index: int) -> str:
        kinds = self.entries("layer_types")
        if index < len(kinds):
            return str(kinds[index])
        other = "linear_attention"
        interval = self.number("full_attention_interval")
        if not interval:
            other = "sliding_attention"
            interval = self.number("sliding_window_pattern")
            if self.values.get("model_type") == "gpt_oss":
                interval = 2
        is_full = not interval or (index + 1) % interval == 0
        return "full_attention" if is_full else other

    def _of_layer(self, index: int) -> "_Reader":
        """Return the config of a layer, which may differ from the others'."""
        layers = section(self.values, "per_layer_config")
        if not layers:
            return self
        padded = str(index).zfill(max(map(len, layers)))  # transformers 5 writes "05"
        fields = {**section(layers, str(index)), **section(layers, padded)}
        return _Reader({**self.values, **fields}, self.role)

    def _grouped(self, kind: str) -> Layer:
        hidden = self.required("hidden_size")
        heads = self.required("num_attention_heads")
        kv_heads = self.number("num_key_value_heads", heads)
        head_dim = self.number("head_dim", hidden // heads)
        projections = 2  # keys and values
        if kind == "full_attention":
            if self.values.get("attention_k_eq_v"):  # Gemma 4
                kv_heads = self.number("num_global_key_value_heads", kv_heads)
                projections = 1
            head_dim = self.number("global_head_dim", head_dim)
        query = heads * head_dim
        # Qwen3-Next and Qwen3.5 gate the output of attention without saying so
        is_qwen = "linear_num_value_heads" in self.values and "attn_output_gate" not in self.values
        gate = query if is_qwen or self.values.get("attn_output_gate") else 0
        return Layer(
            attention=hidden * (query + gate + projections * kv_heads * head_dim + query),
            query=query,
            kv_heads=kv_heads,
            cached=2 * kv_heads * head_dim,
        )

    def _latent(self) -> Layer:
        """Return DeepSeek's MLA: one compressed row a token, which every GPU holds."""
        hidden = self.required("hidden_size")
        heads = self.required("num_attention_heads")
        rank = self.required("kv_lora_rank")
        rope = self.required("qk_rope_head_dim")
        plain = self.required("qk_nope_head_dim")
        value = self.required("v_head_dim")
        query = heads * (plain + rope)
        query_rank = self.number("q_lora_rank")
        queries = (hidden + query) * query_rank if query_rank else hidden * query
        compressed = hidden * (rank + rope) + rank * heads * (plain + value)
        return Layer(
            attention=queries + compressed + heads * value * hidden,
            query=heads * (rank + rope),  # decoding multiplies in the compressed space
            kv_heads=1,
            cached=rank + rope,
        )

    def _linear(self) -> Layer:
        """Return a gated delta rule layer (Qwen3-Next)."""
        hidden = self.required("hidden_size")
        heads = self.number("linear_num_value_heads")
        key = self.number("linear_key_head_dim", 128)
        value = self.number("linear_value_head_dim", 128)
        conv = self.number("linear_conv_kernel_dim", 4)
        keys = self.number("linear_num_key_heads", heads) * key
        values = heads * value
        conv_width = 2 * keys + values
        return Layer(
            # q, k, v, the output gate, two gates of the state, the convolution, the projection
            attention=hidden * (2 * keys + 3 * values + 2 * heads) + conv * conv_width,
            query=0,
            kv_heads=max(heads, 1),
            cached=0,
            recurrent=Recurrent(
                matrices=heads * key * value,
                channels=conv_width,
                window=conv - 1,
                draft=keys + values + 2 * heads,
            ),
        )

    def _mlp_fields(self, index: int) -> dict[str, Any]:
        hidden = self.required("hidden_size")
        module = f"model.layers.{index}.mlp"
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        count = next(filter(None, map(self.number, names)), 0)
        is_dense = (
            index < self.number("first_k_dense_replace")
            or index in self.entries("mlp_only_layers")
            or (index + 1) % self.number("decoder_sparse_step", 1)
            or self.values.get("enable_moe_block") is False
        )
        if not count or is_dense:
            mlp_format = self._format(f"{module}.gate_proj")
            return {"mlp": 3 * hidden * self.number("intermediate_size"), "mlp_format": mlp_format}
        width = self.number("moe_intermediate_size") or self.required("intermediate_size")
        shared = width * self.number("n_shared_experts")
        shared = self.number("shared_expert_intermediate_size", shared)
        if self.values.get("enable_moe_block"):  # Gemma 4: the MLP beside the experts
            shared = self.required("intermediate_size")
        chosen = self.number("num_experts_per_tok", self.number("top_k_experts", 1))
        name = "shared_experts" if self.values.get("n_shared_experts") else "shared_expert"
        return {
            "mlp": 3 * hidden * shared + hidden * count,
            "mlp_format": self._format(f"{module}.{name}.gate_proj"),
            "experts": count,
            "chosen": min(chosen, count),
            "expert": 3 * hidden * width,
            "expert_format": self._format(f"{module}.experts.0.gate_proj", expert=True),
        }

    def _format(self, module: str, *, expert: bool = False) -> Format:
        """Return a module's format, from `quantization_config` as in published models."""
        quant = self.object_in("quantization_config")
        for name in ("modules_to_not_convert", "ignore", "exclude_modules"):
            if any(_matches(str(pattern), module) for pattern in quant.entries(name)):
                return BF16
        method = quant.values.get("quant_method")
        if method == "mxfp4":
            return MXFP4 if expert else BF16
        algorithm = quant.values.get("quant_algo")
        layers = section(quant.values, "quantized_layers")
        if layers:
            matching = [name for name in layers if _matches(name, module)]
            algorithm = section(layers, matching[0]).get("quant_algo") if matching else None
        groups = quant.object_in("config_groups")
        first = next(iter(groups.values), "")
        weights = groups.object_in(first).object_in("weights")
        stored = (weights.values.get("num_bits"), weights.values.get("type"))
        if method == "fp8" or algorithm == "FP8" or stored == (8, "float"):
            return FP8
        if algorithm in ("W4A16_AWQ", "W4A8_AWQ") or stored == (4, "int"):  # as in Kimi-K2 Thinking
            size = 0.5 + 2 / weights.number("group_size", 128)
            multiplied = "fp8" if algorithm == "W4A8_AWQ" else "bf16"
            return Format("int4", size, multiplied)
        if algorithm == "NVFP4" or stored == (4, "float"):
            return NVFP4
        return BF16


def _matches(pattern: str, module: str) -> bool:
    # prefixes before `layers` may differ
    if pattern.startswith("re:"):
        return re.search(pattern[3:], module) is not None
    pattern = re.sub(r"^.*?layers\.", "layers.", pattern)
    module = re.sub(r"^.*?layers\.", "layers.", module)
    return fnmatch(module, pattern) or fnmatch(module, f"{pattern}.*")

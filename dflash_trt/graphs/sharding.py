"""Tensor parallelism: the share of a model that each rank holds (`layers.py` joins them).

As in Megatron-LM: q, k, v, gate and up projections are split by outputs (whole heads), o and down
projections by inputs, and their results summed over ranks. Embedding and head are split by tokens.
Every rank has the router and a share of every expert, so all have equal work. Norms and small
tensors are whole on every rank. All ranks' graphs have the same nodes; they differ in weights and a
few constants.
"""

import re
from dataclasses import dataclass, replace
from typing import TypeVar

from dflash_trt.checkpoints import DecoderSpec, DrafterSpec, Shard, Weights
from dflash_trt.errors import ConfigError

Spec = TypeVar("Spec", bound=DecoderSpec)

# suffixes of names, and the axis along which these tensors are split
AXES = {
    **{f"{projection}_proj.{what}": 0 for projection in "qkv" for what in ("weight", "bias")},
    "sinks": 0,
    "attention_sink_bias": 0,
    "o_proj.weight": 1,
    "gate_proj.weight": 0,
    "up_proj.weight": 0,
    "down_proj.weight": 1,
    "experts.gate_up_proj": 2,  # gpt-oss: [E, in, out], gate and up columns interleaved
    "experts.gate_up_proj_bias": 1,
    "experts.down_proj": 1,
    "embed_tokens.weight": 0,
    "lm_head.weight": 0,
    "fc.weight": 1,
}


@dataclass(frozen=True)
class Rank:
    index: int = 0
    of: int = 1  # GPUs that compute a model together


ALONE = Rank()


def share(spec: Spec, weights: Weights, rank: Rank) -> tuple[Spec, Weights]:
    """Return a rank's spec and weights of a model that divides (see `check_even`).

    With fewer key-value heads than ranks, neighboring ranks hold the same head.
    """
    if rank.of == 1:
        return spec, weights

    def where(name: str, shape: tuple[int, ...]) -> Shard | None:
        axis = next((a for end, a in AXES.items() if f".{name}".endswith(f".{end}")), None)
        if axis is None:
            return None
        layer = re.search(r"layers\.(\d+)\.self_attn\.[kv]_proj\.", name)
        parts = rank.of
        if layer is not None and int(layer[1]) < len(spec.layers):
            parts = min(parts, spec.layers[int(layer[1])].num_key_value_heads)
        size = shape[axis] // parts
        start = rank.index * parts // rank.of * size
        return Shard(axis, start, start + size)

    layers = tuple(
        replace(
            layer,
            num_key_value_heads=max(1, layer.num_key_value_heads // rank.of),
            intermediate_size=layer.intermediate_size // rank.of,
        )
        for layer in spec.layers
    )
    heads = spec.num_attention_heads // rank.of
    return replace(spec, num_attention_heads=heads, layers=layers), weights.shard(where)


def check_even(spec: DecoderSpec, role: str, ranks: int) -> None:
    """Raise ConfigError with the sizes of a target or drafter that do not divide by ranks."""
    numbers = [("num_attention_heads", spec.num_attention_heads), ("vocab_size", spec.vocab_size)]
    if isinstance(spec, DrafterSpec):
        numbers.append(("taps x hidden_size", len(spec.target_layer_ids) * spec.hidden_size))
        numbers.append(("draft_vocab_size", spec.num_logits))
    for layer in spec.layers:
        heads = layer.num_key_value_heads
        if ranks % heads:  # otherwise each head is on several ranks
            numbers.append(("num_key_value_heads", heads))
        numbers.append(("intermediate_size", layer.intermediate_size))
    uneven = dict.fromkeys(f"{name} {size} / {ranks}" for name, size in numbers if size % ranks)
    if uneven:
        raise ConfigError(
            f"the {role} cannot be cut for {ranks} ranks: {', '.join(uneven)}",
            "Choose another tensor_parallel_size: 1, 2, 4 or 8",
        )

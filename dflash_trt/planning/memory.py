"""What fits into a GPU: weights, caches, and the drafter's context.

TensorRT-LLM gives the KV cache a fraction of what the weights leave. The drafter's context is
either in that pool too (`attention_backend: TRTLLM`) or a dense arena with room for every
sequence at its longest, (batch + 1) 2 L (max_seq_len + block) heads head_dim 2 bytes, which may
take 0.7 of the rest (upstream's `TorchLlmArgs._validate_dflash_ctx_budget`, pull request 19466).
"""

from dataclasses import dataclass

from dflash_trt.roofline.hardware import Gpu
from dflash_trt.roofline.passes import Layout
from dflash_trt.roofline.shape import Shape
from dflash_trt.tensorrt_llm.memory import CACHE_BYTES, OVERHEAD, SHARE

POOL_FRACTION = 0.85  # free_gpu_memory_fraction where the pool has everything
STATE_BYTES = 2


@dataclass(frozen=True)
class Memory:
    """One GPU of a layout; bytes."""

    layout: Layout
    target: float
    drafter: float
    free: float  # for caches
    per_token: float  # of one sequence's target cache, where no window ends it
    sequence: float  # of one sequence's target cache and state at this context
    drafting: float  # of its drafter's context
    sequences: int  # of the whole instance
    fraction: float  # free_gpu_memory_fraction to set


def weights(shape: Shape, layout: Layout) -> float:
    """Bytes on each GPU; with attention-DP all but experts is on every one."""
    split = 1 if layout.attention_dp else layout.gpus
    experts = sum(
        layer.experts * layer.expert * layer.expert_format.bytes for layer in shape.layers
    )
    return (shape.weight_bytes - experts) / split + experts / layout.gpus


def cache(shape: Shape, layout: Layout, tokens: int, size: float) -> float:
    """Bytes on each GPU that holds a sequence of `tokens` tokens, `size` bytes a number."""
    split = 1 if layout.attention_dp else layout.gpus
    return sum(
        count
        * (layer.cached * min(tokens, layer.window or tokens) * size + layer.state * STATE_BYTES)
        / min(split, layer.kv_heads)
        for layer, count in shape.kinds.items()
    )


def arena_slot(drafter: Shape, layout: Layout, max_seq_len: int, block: int) -> float:
    """Bytes on each GPU of one sequence in the dense arena; windows do not make it smaller."""
    split = 1 if layout.attention_dp else layout.gpus
    return sum(
        count * layer.cached * (max_seq_len + block) * CACHE_BYTES / min(split, layer.kv_heads)
        for layer, count in drafter.kinds.items()
    )


def fit(
    gpu: Gpu,
    layout: Layout,
    target: Shape,
    drafter: Shape,
    *,
    context: int,
    block: int,
    kv_bytes: float,
    paged: bool,
) -> Memory:
    """How many sequences of `context` tokens one instance holds; 0 where the weights do not fit.

    block: tokens of a round; paged: the drafter's context is in the pool of the KV cache.
    """
    own, drafting = weights(target, layout), weights(drafter, layout)
    free = gpu.memory_bytes - own - drafting - OVERHEAD
    sequence = cache(target, layout, context + block, kv_bytes)
    if paged:
        slot = cache(drafter, layout, context, CACHE_BYTES)
        fraction = POOL_FRACTION
        count = int(free * fraction / (sequence + slot))
    else:  # the fraction with which pool and arena hold equally many, one slot being for padding
        slot = arena_slot(drafter, layout, context, block)
        count = int((SHARE * free - slot) / (slot + SHARE * sequence))
        fraction = count * sequence / free if count > 0 else 0.0
    windowless = sum(n * x.cached for x, n in target.kinds.items() if not x.window)
    heads = min((x.kv_heads for x in target.kinds if x.cached), default=1)
    split = 1 if layout.attention_dp else min(layout.gpus, heads)
    return Memory(
        layout=layout,
        target=own,
        drafter=drafting,
        free=free,
        per_token=windowless * kv_bytes / split,
        sequence=sequence,
        drafting=slot,
        sequences=max(count, 0) * (layout.gpus if layout.attention_dp else 1),
        fraction=fraction,
    )

"""Memory of a GPU: weights, caches, and the drafter's context.

TensorRT-LLM gives the KV cache a fraction of the memory left by the weights. The drafter's context
is either in that pool (`attention_backend: TRTLLM`, pull request 18343) or a dense arena (VANILLA,
FA4; the pool has no room for it any more since pull request 19410) with room for every sequence at
its longest, (batch + 1) 2 L (max_seq_len + block) heads head_dim 2 bytes, which may take 0.7 of the
rest (upstream's `TorchLlmArgs._validate_dflash_ctx_budget`, pull request 19466).
"""

from dataclasses import dataclass

from dflash_trt.planning.hardware import Gpu
from dflash_trt.planning.model_size import ModelSize
from dflash_trt.planning.rounds import Layout

OVERHEAD = 4 << 30  # bytes of CUDA, graphs and activations
ARENA_SHARE = 0.7  # of the memory that the KV cache leaves
CONTEXT_BYTES = 2  # per number in the drafter's context, bf16
POOL_FRACTION = 0.85  # free_gpu_memory_fraction if the pool holds everything
STATE_BYTES = 2


@dataclass(frozen=True)
class Memory:
    """Memory of one GPU of a layout; bytes."""

    target: float
    drafter: float
    free: float  # for caches
    per_token: float  # one token in the target's cache, layers without a window only
    sequence: float  # one sequence's target cache and state at this context length
    drafting: float  # one sequence's drafter context
    sequences: int  # of the whole instance
    fraction: float  # free_gpu_memory_fraction to set


def weights(model: ModelSize, layout: Layout) -> float:
    """Return the bytes on each GPU; attention-DP replicates everything but the experts."""
    experts = sum(
        layer.experts * layer.expert * layer.expert_format.bytes for layer in model.layers
    )
    return (model.weight_bytes - experts) / layout.split + experts / layout.gpus


def cache(model: ModelSize, layout: Layout, tokens: int, size: float) -> float:
    """Return the bytes per GPU of a sequence of `tokens` tokens, `size` bytes a number."""
    return sum(
        count
        * (layer.cached * min(tokens, layer.window or tokens) * size + layer.state * STATE_BYTES)
        / min(layout.split, layer.kv_heads)
        for layer, count in model.kinds.items()
    )


def arena_slot(drafter: ModelSize, ranks: int, tokens: int) -> int:
    """Return the bytes per GPU of one sequence in the dense arena; windows do not reduce it.

    ranks: divide the KV heads; tokens: max_seq_len and a round's.
    """
    return sum(
        count * layer.cached // layer.kv_heads * max(1, layer.kv_heads // ranks)
        for layer, count in drafter.kinds.items()
    ) * (tokens * CONTEXT_BYTES)


def fit_memory(
    gpu: Gpu,
    layout: Layout,
    target: ModelSize,
    drafter: ModelSize,
    *,
    context: int,
    block: int,
    kv_bytes: float,
    paged: bool,
) -> Memory:
    """Return how many sequences of `context` tokens one instance holds; 0 if weights do not fit.

    block: tokens of a round; paged: the drafter's context is in the pool of the KV cache.
    """
    own, drafting = weights(target, layout), weights(drafter, layout)
    free = gpu.memory_bytes - own - drafting - OVERHEAD
    sequence = cache(target, layout, context + block, kv_bytes)
    if paged:
        slot = cache(drafter, layout, context, CONTEXT_BYTES)
        fraction = POOL_FRACTION
        count = int(free * fraction / (sequence + slot))
    else:  # at this fraction pool and arena hold equally many sequences; one slot is for padding
        slot = arena_slot(drafter, layout.split, context + block)
        count = int((ARENA_SHARE * free - slot) / (slot + ARENA_SHARE * sequence))
        fraction = count * sequence / free if count > 0 else 0.0
    windowless = sum(n * layer.cached for layer, n in target.kinds.items() if not layer.window)
    heads = min((layer.kv_heads for layer in target.kinds if layer.cached), default=1)
    return Memory(
        target=own,
        drafter=drafting,
        free=free,
        per_token=windowless * kv_bytes / min(layout.split, heads),
        sequence=sequence,
        drafting=slot,
        sequences=max(count, 0) * (layout.gpus if layout.attention_dp else 1),
        fraction=fraction,
    )

"""What fits on a machine: layouts, weights, caches and the drafter's context.

TensorRT-LLM gives the KV cache a fraction of the memory left by the weights. The drafter's context
is either in that pool (`attention_backend: TRTLLM`, pull request 18343) or in an arena of its own
(VANILLA, FA4; pull request 19410) with room for every sequence at its longest. The arena usually
comes before the pool, which then gets a fraction of the rest (pull request 19466).
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from dflash_trt.hardware import Machine
from dflash_trt.planning.model_size import Layer, ModelSize
from dflash_trt.planning.rounds import Constants, Layout, Method, Runtime, Software, fastest

OVERHEAD = 4 << 30  # bytes of CUDA, graphs and activations
RESERVE = 6 << 30  # bytes of activations that upstream keeps free of an arena
ARENA_SHARE = 0.7  # of what the pool leaves, where the pool comes first
PAGE = 32  # tokens of an arena's page
CONTEXT_BYTES = 2  # per number in the drafter's context, bf16
POOL_FRACTION = 0.85  # free_gpu_memory_fraction if the pool holds everything
STATE_BYTES = 2
MAX_CONCURRENCY = 16384  # largest number of sequences considered


@dataclass(frozen=True)
class Deployment:
    software: ClassVar[Software] = "tensorrt_llm"

    machine: Machine
    gpus: int
    target: ModelSize
    drafter: ModelSize
    block: int  # most tokens of a round
    kv_bytes: float = 2  # per number in the target's cache
    backend: str = "TRTLLM"  # the drafter's attention: with TRTLLM its context is in the pool
    pool_fraction: float = POOL_FRACTION
    pool_first: bool = False  # memory for the pool is taken before an arena's
    stored_bytes: float = 0  # of the target's files, vision towers and all; 0: unknown

    def layouts(self) -> Iterator[Layout]:
        """Yield the layouts of one instance; the GPUs hold as many instances as fit."""
        experts = any(layer.experts for layer in self.target.layers)
        gpus = 1
        while gpus <= min(self.gpus, self.machine.domain):
            if self.gpus % gpus == 0:
                yield Layout(gpus)
                if experts and gpus > 1:
                    yield Layout(gpus, experts_parallel=True)
                    yield Layout(gpus, attention_dp=True, experts_parallel=True)
            gpus *= 2

    def target_bytes(self, layout: Layout) -> float:
        """Return the bytes on one GPU."""
        stored = self.stored_bytes or self.target.weight_bytes
        return bytes_per_gpu(self.target, layout) * stored / self.target.weight_bytes

    def free_bytes(self, layout: Layout) -> float:
        models = self.target_bytes(layout) + bytes_per_gpu(self.drafter, layout)
        return self.machine.gpu.memory_bytes - (models + OVERHEAD)

    def fit(self, layout: Layout, context: int, longest: int) -> int:
        """Return how many sequences one instance holds; 0 if weights do not fit.

        context: tokens of a sequence in the KV cache. longest: max_seq_len, for which an arena has
        room.
        """
        pool = self.pool_fraction * self.free_bytes(layout)
        sequence = cache_bytes(self.target, layout, context + self.block, self.kv_bytes)
        if self.backend == "TRTLLM":
            slot = cache_bytes(self.drafter, layout, context, CONTEXT_BYTES)
            count = pool / (sequence + slot)
        else:
            slot = arena_slot(self.drafter, layout.split, longest + self.block, self.backend)
            of_pool = 0.0 if self.pool_first else self.pool_fraction * slot
            in_pool = (pool - of_pool) / (sequence + of_pool)  # one slot is for padding
            count = min(in_pool, self._arena_bytes(layout) / slot - 1)
        return max(int(count), 0) * (layout.gpus if layout.attention_dp else 1)

    def _arena_bytes(self, layout: Layout) -> int:
        return arena_budget(
            self.machine.gpu.memory_bytes,
            self.target_bytes(layout),
            self.pool_fraction,
            pool_first=self.pool_first,
        )

    def memory(self, contexts: Sequence[int], longest: int) -> Iterator[dict[str, Any]]:
        """Yield each layout, with bytes on one GPU and sequences of the whole machine by length.

        longest: max_seq_len, unless a length is larger.
        """
        for layout in self.layouts():
            if layout.experts_parallel and not layout.attention_dp:
                continue  # it weighs the same without
            instances = self.gpus // layout.gpus
            kinds = self.target.kinds
            windowless = sum(n * layer.cached for layer, n in kinds.items() if not layer.window)
            heads = min((layer.kv_heads for layer in kinds if layer.cached), default=1)
            yield {
                "layout": str(layout),
                "gpus": layout.gpus,
                "instances": instances,
                "target_bytes": round(self.target_bytes(layout)),
                "drafter_bytes": round(bytes_per_gpu(self.drafter, layout)),
                "free_bytes": round(self.free_bytes(layout)),  # for caches
                # in the target's cache, layers without a window only
                "kv_bytes_per_token": round(windowless * self.kv_bytes / min(layout.split, heads)),
                # of a sequence, whatever its length: linear attention
                "state_bytes": round(cache_bytes(self.target, layout, 0, self.kv_bytes)),
                "sequences": {
                    context: instances * self.fit(layout, context, max(context, longest))
                    for context in contexts
                },
            }

    def speed(self, method: Method, context: int, longest: int) -> Iterator[dict[str, Any]]:
        """Yield the best layout and draft length for 1, 2, 4, .. sequences, while they fit.

        context and longest are as of `fit`. Figures are tokens/s, and seconds of a round's parts.
        """
        constants = Constants.fitted()
        room = {layout: self.fit(layout, context, longest) for layout in self.layouts()}
        concurrency = 1
        while concurrency <= MAX_CONCURRENCY:
            rounds = {}
            for layout, sequences in room.items():
                fullest = -(-concurrency * layout.gpus // self.gpus)  # of the fullest instance
                if fullest <= sequences:
                    gpu, kv_bytes = self.machine.gpu, self.kv_bytes
                    runtime = Runtime(gpu, layout, constants, self.software, kv_bytes)
                    rounds[layout] = fastest(self.target, method, runtime, fullest, context)
            if not rounds:
                return
            layout, best = max(rounds.items(), key=lambda item: item[1].rate)
            yield {
                "method": best.method.name,
                "concurrency": concurrency,
                "layout": str(layout),
                "draft_tokens": best.method.draft_tokens,
                "acceptance": round(best.method.acceptance, 3),
                "tokens_per_user": round(best.rate, 1),
                "tokens_per_gpu": round(best.rate * concurrency / self.gpus, 1),
                "round": asdict(best.step),
            }
            concurrency *= 2


def bytes_per_gpu(model: ModelSize, layout: Layout) -> float:
    # attention-DP replicates everything but the experts
    experts = sum(
        layer.experts * layer.expert * layer.expert_format.bytes for layer in model.layers
    )
    return (model.weight_bytes - experts) / layout.split + experts / layout.gpus


def cache_bytes(model: ModelSize, layout: Layout, tokens: int, size: float) -> float:
    """Return the bytes per GPU of a sequence; size: bytes of a number."""

    def layer_bytes(layer: Layer) -> float:
        in_window = min(tokens, layer.window or tokens)
        return layer.cached * in_window * size + layer.state * STATE_BYTES

    return sum(
        count * layer_bytes(layer) / min(layout.split, layer.kv_heads)
        for layer, count in model.kinds.items()
    )


def arena_budget(memory: int, weights: float, pool_fraction: float, *, pool_first: bool) -> int:
    """Return the bytes per GPU that upstream allows the arena to take.

    As `derive_dflash_ctx_memory_budget_bytes` of _torch/speculative/dflash.py (pull request 19466).
    weights: of the target, on one GPU.
    """
    free = memory - OVERHEAD - weights
    budget = free * (1 - pool_fraction) * ARENA_SHARE if pool_first else free - RESERVE
    return max(0, int(budget))


def arena_slot(drafter: ModelSize, ranks: int, tokens: int, backend: str) -> int:
    """Return the bytes per GPU of one sequence in the arena; windows do not reduce it.

    As `compute_dflash_ctx_buffer_bytes` of _torch/speculative/dflash.py (pull request 19466).
    ranks: divide the KV heads; tokens: max_seq_len and a round's; backend: of the drafter's
    attention, which but for VANILLA has pages.
    """
    if backend != "VANILLA":
        tokens = -(-tokens // PAGE) * PAGE
    numbers = sum(
        count * layer.cached // layer.kv_heads * max(1, layer.kv_heads // ranks)
        for layer, count in drafter.kinds.items()
    )
    return numbers * tokens * CONTEXT_BYTES

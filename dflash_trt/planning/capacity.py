"""What fits on a machine: layouts, weights, caches and the drafter's context.

TensorRT-LLM gives the KV cache a fraction of the memory left by the weights. The drafter's context
is either in that pool (`attention_backend: TRTLLM`, pull request 18343) or a dense arena (VANILLA,
FA4; the pool has no room for it any more since pull request 19410) with room for every sequence at
its longest, (batch + 1) 2 L (max_seq_len + block) heads head_dim 2 bytes, which may take 0.7 of the
rest (upstream's `TorchLlmArgs._validate_dflash_ctx_budget`, pull request 19466).
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dflash_trt.planning.hardware import Machine
from dflash_trt.planning.model_size import ModelSize
from dflash_trt.planning.rounds import Constants, Layout, Method, Runtime, fastest

OVERHEAD = 4 << 30  # bytes of CUDA, graphs and activations
ARENA_SHARE = 0.7  # of the memory that the KV cache leaves
CONTEXT_BYTES = 2  # per number in the drafter's context, bf16
POOL_FRACTION = 0.85  # free_gpu_memory_fraction if the pool holds everything
STATE_BYTES = 2
MAX_CONCURRENCY = 16384  # largest number of sequences considered


@dataclass(frozen=True)
class Deployment:
    machine: Machine
    gpus: int
    target: ModelSize
    drafter: ModelSize
    block: int  # most tokens of a round
    kv_bytes: float = 2  # per number in the target's cache
    paged: bool = True  # the drafter's context is in the KV cache's pool

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

    def free_bytes(self, layout: Layout) -> float:
        models = bytes_per_gpu(self.target, layout) + bytes_per_gpu(self.drafter, layout)
        return self.machine.gpu.memory_bytes - (models + OVERHEAD)

    def fit(self, layout: Layout, context: int) -> int:
        """Return how many sequences one instance holds; 0 if weights do not fit."""
        free = self.free_bytes(layout)
        sequence = cache_bytes(self.target, layout, context + self.block, self.kv_bytes)
        if self.paged:
            slot = cache_bytes(self.drafter, layout, context, CONTEXT_BYTES)
            count = int(free * POOL_FRACTION / (sequence + slot))
        else:  # pool and arena hold equally many sequences; one slot is padding
            slot = arena_slot(self.drafter, layout.split, context + self.block)
            count = int((ARENA_SHARE * free - slot) / (slot + ARENA_SHARE * sequence))
        return max(count, 0) * (layout.gpus if layout.attention_dp else 1)

    def memory(self, contexts: Sequence[int]) -> Iterator[dict[str, Any]]:
        """Yield each layout, with bytes on one GPU and sequences of the whole machine by length."""
        for layout in self.layouts():
            if layout.experts_parallel and not layout.attention_dp:
                continue  # it weighs the same without
            instances = self.gpus // layout.gpus
            windowless = sum(n * x.cached for x, n in self.target.kinds.items() if not x.window)
            heads = min((x.kv_heads for x in self.target.kinds if x.cached), default=1)
            yield {
                "layout": str(layout),
                "gpus": layout.gpus,
                "instances": instances,
                "target_bytes": round(bytes_per_gpu(self.target, layout)),
                "drafter_bytes": round(bytes_per_gpu(self.drafter, layout)),
                "free_bytes": round(self.free_bytes(layout)),  # for caches
                # in the target's cache, layers without a window only
                "kv_bytes_per_token": round(windowless * self.kv_bytes / min(layout.split, heads)),
                # of a sequence, whatever its length: linear attention
                "state_bytes": round(cache_bytes(self.target, layout, 0, self.kv_bytes)),
                "sequences": {each: instances * self.fit(layout, each) for each in contexts},
            }

    def speed(self, method: Method, context: int) -> Iterator[dict[str, Any]]:
        """Yield the best layout and draft length for 1, 2, 4, .. sequences, while they fit.

        Figures are tokens/s, and seconds of the parts of a round.
        """
        constants = Constants.fitted()
        room = {layout: self.fit(layout, context) for layout in self.layouts()}
        concurrency = 1
        while concurrency <= MAX_CONCURRENCY:
            found = []
            for layout, sequences in room.items():
                rows = -(-concurrency * layout.gpus // self.gpus)  # of the fullest instance
                if rows <= sequences:
                    runtime = Runtime(self.machine.gpu, layout, constants, kv_bytes=self.kv_bytes)
                    choice, step = fastest(self.target, method, runtime, rows, context)
                    found.append((choice.acceptance / step.seconds, layout, choice, step))
            if not found:
                return
            rate, layout, choice, step = max(found, key=lambda one: one[0])
            yield {
                "method": choice.name,
                "concurrency": concurrency,
                "layout": str(layout),
                "draft_tokens": choice.draft_tokens,
                "acceptance": round(choice.acceptance, 3),
                "tokens_per_user": round(rate, 1),
                "tokens_per_gpu": round(rate * concurrency / self.gpus, 1),
                "round": asdict(step),
            }
            concurrency *= 2


def bytes_per_gpu(model: ModelSize, layout: Layout) -> float:
    # attention-DP replicates everything but the experts
    experts = sum(x.experts * x.expert * x.expert_format.bytes for x in model.layers)
    return (model.weight_bytes - experts) / layout.split + experts / layout.gpus


def cache_bytes(model: ModelSize, layout: Layout, tokens: int, size: float) -> float:
    """Return the bytes per GPU of a sequence; size: bytes of a number."""
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

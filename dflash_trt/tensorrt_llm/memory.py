"""What the drafter's context takes of a GPU.

The formulas are upstream's `TorchLlmArgs._validate_dflash_ctx_budget` (pull request 19466) and
`DFlashWorker._lazy_init_ctx_buffers` (`_torch/speculative/dflash.py` at 00679c66).
"""

from dflash_trt.tensorrt_llm.case import Case, heads, weight_bytes
from dflash_trt.tensorrt_llm.schema import TorchLlmArgs

OVERHEAD = 4 << 30  # bytes of CUDA, graphs and activations
SHARE = 0.7  # of what the KV cache leaves
CACHE_BYTES = 2  # a number of the drafter's context, bf16


def slot_bytes(case: Case, ranks: int, max_seq_len: int, width: int) -> int:
    """One sequence's dense context on each rank.

    ranks: over which the drafter's KV heads are divided; width: max_draft_len + 1.
    """
    own = heads(case.drafter)
    layers = case.drafter.number("num_hidden_layers")
    kv = max(1, own.kv // ranks)
    return 2 * layers * (max_seq_len + width) * kv * own.dim * CACHE_BYTES


def arena_budget(case: Case, ranks: int, kv_fraction: float | None) -> int:
    """What upstream lets the dense context take of each GPU; ranks: of tensor parallelism."""
    free = case.gpu.memory_bytes - weight_bytes(case.target) // ranks - OVERHEAD
    kept = 1 - (0.9 if kv_fraction is None else kv_fraction)  # upstream's default
    return max(0, int(free * kept * SHARE))


def arena_batch(slot: int, budget: int) -> int:
    """The most sequences whose contexts fit; upstream has one more slot, for padding."""
    return max(0, budget // slot - 1)


def attention_ranks(args: TorchLlmArgs) -> int:
    """Over how many ranks attention is divided: with attention-DP each has it whole."""
    return 1 if args.enable_attention_dp else args.tensor_parallel_size

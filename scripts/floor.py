"""What this machine can do, as the least time of a step: for scripts/engines_table.py."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch
from bench_table import THREADS

from dflash_trt.checkpoints import load_target, target_shapes

BITS = {"float32": 32.0, "int8": 8.5, "int4": 4.5}  # of a weight, a float16 scale for 32 counted


@dataclass(frozen=True, order=True)
class Work:
    """kind "decode": a step of `size` sequences; "verify": of `size` tokens of one; "prefill": a
    prompt of `size` tokens."""

    kind: str
    size: int


def machine_floor() -> tuple[float, float]:
    """Bytes/s that two threads read, and FLOP/s of a product in float32, here and now."""
    halves = [np.ones(128 << 20, np.float32) for _ in range(THREADS)]
    with ThreadPoolExecutor(THREADS) as pool:
        read = min(seconds(lambda: list(pool.map(np.max, halves))) for _ in range(3))
    torch.set_num_threads(THREADS)  # whose product is the fastest of those here
    square = torch.ones(2048, 2048)
    product = min(seconds(lambda: square @ square) for _ in range(5))
    return sum(half.nbytes for half in halves) / read, 2 * 2048**3 / product


def floor_of(
    target: Path, precision: str, bandwidth: float, flops: float
) -> Callable[[Work], float]:
    """Seconds of the larger of both: reading all weights once (of the embedding only the head's
    use), and multiplying; with int8 and int4 of reading."""
    model = load_target(target)
    shapes = target_shapes(model.spec)
    matrices = {name: prod(shape) for name, shape in shapes.items() if len(shape) > 1}
    embedding = matrices.pop(f"{model.spec.prefix}embed_tokens.weight")
    head = matrices.pop("lm_head.weight", embedding)
    layers = sum(matrices.values())

    def least(work: Work) -> float:
        scored = 1 if work.kind == "prefill" else work.size
        read = (layers + head) * BITS[precision] / 8 / bandwidth
        multiplied = 2 * (layers * work.size + head * scored) / flops
        return read if precision != "float32" else max(read, multiplied)

    return least


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start

"""The drafter's arena, by the cases of TensorRT-LLM's own test.

tests/unittest/_torch/speculative/hw_agnostic/test_dflash_config_budget.py of pull request 19466,
read 2026-11-28; its numbers, not its code.
"""

from dataclasses import replace
from typing import Any

import pytest

from dflash_trt.hardware import PRESETS
from dflash_trt.planning import Deployment, Layout, drafter_size, target_size
from dflash_trt.planning.capacity import arena_budget, arena_slot

GIB = 1 << 30
# 5 layers, 16 KV heads of 64: four on each of four GPUs
LARGE = {"num_hidden_layers": 5, "num_attention_heads": 128, "num_key_value_heads": 16,
         "head_dim": 64, "hidden_size": 8192, "intermediate_size": 8192}  # fmt: skip
# Laguna-XS' drafter, which upstream accepts on one GPU
SMALL = {**LARGE, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
TARGET = target_size({**LARGE, "vocab_size": 1024})
FOUR = Layout(4)


def size_of(values: dict[str, Any]) -> Any:
    return drafter_size({**values, "target_layer_ids": [1]}, TARGET)


# total, free_gpu_memory_fraction, the target's weights on a GPU; GiB
BUDGETS = [
    ("arena first", 100, 0.8, 50, 40.0),
    ("arena first", 100, 0.9, 50, 40.0),
    ("arena first", 100, 0.5, 50, 40.0),
    ("arena first", 100, 0.8, 0, 90.0),
    ("arena first", 70, 0.8, 50, 10.0),
    ("arena first", 8, 0.8, 100, 0.0),
    ("arena first", 7, 0.8, 0, 0.0),
    ("pool first", 100, 0.8, 50, 46 * 0.2 * 0.7),
    ("pool first", 100, 0.8, 0, 96 * 0.2 * 0.7),
    ("pool first", 8, 0.8, 100, 0.0),
]


@pytest.mark.parametrize(("order", "total", "fraction", "weights", "expected"), BUDGETS)
def test_what_upstream_allows_it(
    order: str, total: int, fraction: float, weights: int, expected: float
) -> None:
    budget = arena_budget(total * GIB, weights * GIB, fraction, pool_first=order == "pool first")
    assert budget == pytest.approx(expected * GIB, abs=1)


@pytest.mark.parametrize(
    ("drafter", "ranks", "tokens", "backend", "expected"),
    [
        (LARGE, 4, 1048576 + 8, "VANILLA", 2 * 5 * (1048576 + 8) * 4 * 64 * 2),
        (LARGE, 4, 8192 + 8, "VANILLA", 2 * 5 * (8192 + 8) * 4 * 64 * 2),
        (LARGE, 16, 100 + 8, "TRTLLM", 2 * 5 * 128 * 1 * 64 * 2),
        (LARGE, 32, 100 + 8, "FA4", 2 * 5 * 128 * 1 * 64 * 2),
        (SMALL, 1, 4096 + 5, "VANILLA", 2 * 5 * (4096 + 5) * 8 * 128 * 2),
    ],
)
def test_what_one_sequence_takes(
    drafter: dict[str, Any], ranks: int, tokens: int, backend: str, expected: int
) -> None:
    assert arena_slot(size_of(drafter), ranks, tokens, backend) == expected


@pytest.mark.parametrize(("total", "weights"), [(178, 62), (79, 33)])
def test_configs_that_upstream_runs_are_allowed_by_the_merged_form_alone(
    total: int, weights: int
) -> None:
    arena = (128 + 1) * arena_slot(size_of(SMALL), 1, 4096 + 5, "VANILLA")
    assert arena <= arena_budget(total * GIB, weights * GIB, 0.9, pool_first=False)
    assert arena > arena_budget(total * GIB, weights * GIB, 0.9, pool_first=True)


@pytest.mark.parametrize(
    ("total", "pool_first", "sequences", "fits"),
    [(100, False, 200, True), (100, True, 200, False), (70, False, 400, False)],
)
def test_batches_at_8192_tokens(total: int, pool_first: bool, sequences: int, fits: bool) -> None:
    """A target of 200 GiB on four GPUs; its own cache is left out, as it is there."""
    machine = PRESETS["hgx-h200"]
    deployment = Deployment(
        machine=replace(machine, gpu=replace(machine.gpu, memory_bytes=total * GIB)),
        gpus=4,
        target=TARGET,
        drafter=size_of(LARGE),
        block=8,
        kv_bytes=1e-9,
        backend="VANILLA",
        pool_fraction=0.8,
        pool_first=pool_first,
        stored_bytes=200 * GIB,
    )
    assert (deployment.fit(FOUR, 8192, 8192) >= sequences) == fits


def test_the_pool_keeps_room_for_as_many_sequences_as_the_arena() -> None:
    deployment = Deployment(
        machine=PRESETS["hgx-h200"],
        gpus=4,
        target=TARGET,
        drafter=size_of(LARGE),
        block=8,
        backend="VANILLA",
    )
    few = deployment.fit(FOUR, 8192, 8192)
    more = deployment.fit(FOUR, 1024, 8192)
    assert 0 < few < more < replace(deployment, kv_bytes=1e-9).fit(FOUR, 1024, 8192)
    free = deployment.free_bytes(FOUR)
    slot = arena_slot(deployment.drafter, 4, 8192 + 8, "VANILLA")
    sequence = 2 * 5 * (1024 + 8) * 4 * 64 * 2
    pool = deployment.pool_fraction * (free - (more + 1) * slot)
    assert more * sequence <= pool < (more + 1) * sequence + slot

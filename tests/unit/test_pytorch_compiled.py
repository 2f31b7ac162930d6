"""Kernels of engine kind `pytorch` compile for GPUs that are not here, and fit into them."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support.compiled import SHARED, Compiled

PRODUCTS = ("attend_kernel", "experts_kernel", "linear_kernel")
MOST_STACK = 64  # bytes of a thread: more slow a kernel down
OF_EACH = {"attend_kernel", "attention_input_kernel", "combine_kernel", "gated_kernel"}
OF_EACH |= {"linear_kernel", "norm_kernel"}
OF_DELTA_NET = {"convolve_kernel", "decay_kernel", "gated_norm_kernel", "recur_kernel"}


def compile_kernels(capability: int, case: str, dtype: str, directory: Path) -> list[Compiled]:
    results = directory / "kernels.json"
    command = [sys.executable, "-m", "tests.support.compiled", str(capability), case, dtype]
    done = subprocess.run([*command, results], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [Compiled(**kernel) for kernel in json.loads(results.read_text())]


def assert_they_fit(kernels: list[Compiled], capability: int, dtype: str) -> None:
    for kernel in kernels:
        assert kernel.shared <= SHARED[capability], kernel
        assert kernel.stack <= MOST_STACK, kernel
        if kernel.name in PRODUCTS and dtype != "float32":
            assert kernel.tensor_products, kernel


def test_kernels_of_qwen3_8b_compile_for_an_h200(tmp_path: Path) -> None:
    kernels = compile_kernels(90, "qwen3-8b", "bfloat16", tmp_path)
    assert {kernel.name for kernel in kernels} >= OF_EACH
    assert_they_fit(kernels, 90, "bfloat16")
    # other numbers of rows are compiled anew only where a tensor begins at another kind of address
    same = Counter((kernel.name, *kernel.constants.items()) for kernel in kernels)
    assert max(same.values()) <= 2, same.most_common(1)


@pytest.mark.models
@pytest.mark.parametrize("capability", [80, 86, 90, 120])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_sizes_of_published_models(capability: int, dtype: str, tmp_path: Path) -> None:
    kernels = compile_kernels(capability, "sizes", dtype, tmp_path)
    assert_they_fit(kernels, capability, dtype)
    attend = [kernel for kernel in kernels if kernel.name == "attend_kernel"]
    for size in {kernel.constants["SIZE"] for kernel in attend}:
        tiles = [kernel for kernel in attend if kernel.constants["SIZE"] == size]
        # of few rows and of many: a row's weights are added up by the same threads in one order
        assert len({tuple(kernel.sums) for kernel in tiles}) == 1, tiles
        assert len(tiles[0].sums) == 2, tiles  # its largest score, and its weights
    assert len({kernel.constants["ROWS"] for kernel in attend}) == (1 if dtype == "float32" else 2)


@pytest.mark.models
@pytest.mark.parametrize("capability", [each for each in SHARED if each != 90])
def test_other_gpus(capability: int, tmp_path: Path) -> None:
    kernels = compile_kernels(capability, "qwen3-8b", "bfloat16", tmp_path)
    assert_they_fit(kernels, capability, "bfloat16")


@pytest.mark.models
@pytest.mark.parametrize("dtype", ["float16", "float32", "fp8"])
def test_other_types(dtype: str, tmp_path: Path) -> None:
    kernels = compile_kernels(90, "qwen3-8b", dtype, tmp_path)
    assert_they_fit(kernels, 90, dtype)


@pytest.mark.models
@pytest.mark.parametrize(
    ("case", "names"),
    [
        ("gemma2", {"attend_kernel", "combine_kernel"}),
        ("gpt-oss", {"experts_kernel", "add_experts_kernel"}),
        ("qwen3.5-moe", {"experts_kernel", *OF_DELTA_NET}),
    ],
)
def test_other_families(case: str, names: set[str], tmp_path: Path) -> None:
    for capability in (86, 90):
        kernels = compile_kernels(capability, case, "bfloat16", tmp_path)
        assert {kernel.name for kernel in kernels} >= names
        assert_they_fit(kernels, capability, "bfloat16")


@pytest.mark.models
def test_e4m3_needs_8_9(tmp_path: Path) -> None:
    """As `machine.LEAST_FP8` says."""
    assert_they_fit(compile_kernels(89, "qwen3-8b", "fp8", tmp_path), 89, "fp8")
    with pytest.raises(AssertionError, match="fp8e4nv not supported in this architecture"):
        compile_kernels(86, "qwen3-8b", "fp8", tmp_path)

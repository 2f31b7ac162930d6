"""In what form weights are stored: as they were, or quantized."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from dflash_trt.builder.provenance import digests
from dflash_trt.engines.onnxruntime import Engine
from dflash_trt.files import LARGE
from dflash_trt.graphs import builder
from dflash_trt.graphs.quantized import Rows, quantize_rows
from tests.support.builds import build_pair
from tests.support.pairs import make_pair, teach


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_keep_the_dtype_of_the_checkpoint(dtype: str, tmp_path: Path) -> None:
    """The first has one table for embedding and head."""
    make_pair(tmp_path, dtype=dtype, tied=dtype == "float32")
    build_pair(tmp_path, tmp_path / "built")
    graph = onnx.load(tmp_path / "built/engines/target/model.onnx", load_external_data=False).graph
    found = {tensor.data_type for tensor in graph.initializer if len(tensor.dims) == 2}
    own = {"float32": "FLOAT", "bfloat16": "BFLOAT16", "float16": "FLOAT16"}[dtype]
    # float32: the tables of RoPE
    assert found == {onnx.TensorProto.FLOAT, onnx.TensorProto.DataType.Value(own)}


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    directory = tmp_path_factory.mktemp("taught")
    return directory, teach(make_pair(directory, tied=False))


@pytest.mark.parametrize("bits", [4, 8])
def test_every_quantized_product_runs_packed(
    taught: tuple[Path, list[list[int]]], tmp_path: Path, bits: int
) -> None:
    pair, _ = taught
    build_pair(pair, tmp_path / "built", quantize=f"int{bits}")
    target = tmp_path / "built" / "engines" / "target"
    nodes = onnx.load(target / "model.onnx", load_external_data=False).graph.node
    kinds = [node.op_type for node in nodes]
    assert kinds.count("MatMulNBits") == 4 * 4 + 1  # four a layer, and the head
    assert not {"MatMul", "Gemm"} & {*kinds}


def test_each_matrix_is_quantized_once_though_workers_ask_for_its_parts_at_once(
    taught: tuple[Path, list[list[int]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def slowly(compute: Callable[[], Any]) -> builder.Shared[Any]:
        def counted() -> Any:
            calls.append(compute)
            time.sleep(0.01)
            return compute()

        return shared(counted)

    shared = builder.Shared
    monkeypatch.setattr(builder, "Shared", slowly)
    build_pair(taught[0], tmp_path, quantize="int4")
    products = {"target": "MatMulNBits", "drafter": "MatMulInteger"}
    expected = 0
    for role, op in products.items():
        path = tmp_path / "engines" / role / "model.onnx"
        nodes = onnx.load(path, load_external_data=False).graph.node
        expected += [node.op_type for node in nodes].count(op)
    assert len(calls) == expected


def test_a_drafters_integers_are_near_its_numbers_and_each_row_stands_alone(
    taught: tuple[Path, list[list[int]]], tmp_path: Path
) -> None:
    pair, _ = taught
    for quantize in ("none", "int8"):
        build_pair(pair, tmp_path / quantize, quantize=quantize)
    exact, integer = (
        Engine(tmp_path / quantize / "engines" / "drafter") for quantize in ("none", "int8")
    )
    graph = onnx.load(tmp_path / "int8/engines/drafter/model.onnx", load_external_data=False).graph
    products = [node.op_type for node in graph.node].count("MatMulInteger")
    # of a layer: query, key and value, output, two of the MLP; and the head
    assert products == 5 * len(integer.info.caches) + 1
    expected, alone = drafted(exact, 1), drafted(integer, 1)
    assert 0 < np.sqrt(np.mean((alone - expected) ** 2) / np.mean(expected**2)) < 0.05
    assert np.array_equal(drafted(integer, 3)[: len(alone)], alone)


def drafted(engine: Engine, n: int) -> Any:
    rng, width = np.random.default_rng(0), engine.info.block_size
    step = engine.step(0, n, width, 32, n * width, 4)
    for name, array in step.inputs.items():
        array[...] = 0
        if name == "features":
            array[...] = rng.standard_normal(array.shape, np.float32)
    step.inputs["block"][...] = np.arange(n * width).reshape(n, width) + 5
    step.inputs["positions"][...] = np.arange(step.inputs["positions"].shape[-1])
    step.inputs["mask"][..., : 4 + width] = True
    step.inputs["scored_tokens"][...] = np.arange(n * width)
    step.run()
    return np.array(step.outputs["logits"])


@pytest.mark.parametrize(("bits", "bound"), [(4, 1 / 6), (8, 1 / 254)])
def test_blocks_are_quantized_to_half_a_step(bits: int, bound: float) -> None:
    """With 4 bits the farthest may be cut off, so that the others are nearer."""
    matrix = np.random.default_rng(0).standard_normal((24, 96), dtype=np.float32)
    matrix[3, 32:64] = 0
    result = quantize_rows(matrix, bits)
    plain = numbers(result)
    blocks = matrix.reshape(24, 3, 32)
    farthest = np.abs(blocks).max(-1, keepdims=True)
    assert (np.abs(plain - blocks) <= farthest * bound + 1e-6).all()
    assert (plain[3, 1] == 0).all()
    assert (result.scales > 0).all()
    assert result.offsets is None
    if bits == 8:
        assert result.zeros is None
    else:
        even = farthest / 7.5 + 1e-9
        nearest = np.rint(blocks / even).clip(-8, 7) * even
        mean = [np.square(values - blocks).mean() for values in (plain, nearest)]
        assert mean[0] < 0.85 * mean[1]


def numbers(rows: Rows) -> np.ndarray[Any, Any]:
    """Return the matrix `[out, blocks, block]`."""
    zeros = 0 if rows.zeros is None else rows.zeros[..., None]
    return (rows.codes.astype(np.float32) - zeros) * rows.scales[..., None]


def test_a_large_file_has_the_digest_that_b3sum_prints(tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(LARGE + 5)
    found = digests(tmp_path, [tmp_path / "large"], lambda *_: None, "")
    code = "from blake3 import blake3; import sys; d = blake3(); d.update_mmap(sys.argv[1])"
    command = [sys.executable, "-c", code + "; print(d.hexdigest())", str(tmp_path / "large")]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    assert found == {"large": {"blake3": printed, "size": LARGE + 5}}

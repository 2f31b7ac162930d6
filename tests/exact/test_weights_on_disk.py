"""In what form weights are stored: as they were, or quantized."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from dflash_trt.builder.provenance import digests
from dflash_trt.engines.info import read_info
from dflash_trt.engines.onnxruntime import Engine, load_session
from dflash_trt.files import LARGE
from dflash_trt.graphs import builder
from dflash_trt.graphs.quantized import Matrix, join_transposed, quantize_rows, widen_to_8_bits
from dflash_trt.weights.gguf import Blocks
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
    path = target / "model.onnx"
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    load_session(target, read_info(target), options)
    optimized = onnx.load(tmp_path / "optimized.onnx", load_external_data=False)
    before = [node.op_type for node in onnx.load(path, load_external_data=False).graph.node]
    after = [node.op_type for node in optimized.graph.node]
    assert before.count("DequantizeLinear") == 4 * 4 + 1  # four a layer, and the head
    assert after.count("MatMulNBits") == before.count("DequantizeLinear")
    assert "DequantizeLinear" not in after


def test_each_matrix_is_quantized_once_though_workers_ask_for_its_parts_at_once(
    taught: tuple[Path, list[list[int]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def slowly(*arguments: Any) -> Matrix:
        calls.append(arguments)
        time.sleep(0.01)
        return join_transposed(*arguments)

    monkeypatch.setattr(builder, "join_transposed", slowly)
    build_pair(taught[0], tmp_path, quantize="int4")
    products = {"target": "DequantizeLinear", "drafter": "MatMulInteger"}
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
    step.inputs["head_rows"][...] = np.arange(n * width)
    step.run()
    return np.array(step.outputs["logits"])


@pytest.mark.parametrize(("bits", "bound"), [(4, 1 / 6), (8, 1 / 254)])
def test_blocks_are_quantized_to_half_a_step(bits: int, bound: float) -> None:
    """With 4 bits the farthest may be cut off, so that the others are nearer."""
    matrix = np.random.default_rng(0).standard_normal((24, 96), dtype=np.float32)
    matrix[3, 32:64] = 0
    pieces = (quantize_rows(rows, bits) for rows in (matrix[:10], matrix[10:]))
    found = join_transposed(pieces, (96, 24), 3)
    plain = numbers(found)
    farthest = np.repeat(np.abs(matrix.T.reshape(3, 32, 24)).max(1), 32, axis=0)
    assert (np.abs(plain - matrix.T) <= farthest * bound + 1e-6).all()
    assert (plain[32:64, 3] == 0).all()
    assert (found.scales > 0).all()  # TensorRT takes no other
    assert not found.offsets.any()
    if bits == 8:
        assert not found.zeros.any()
    else:
        even = np.abs(matrix.T.reshape(3, 32, 24)).max(1, keepdims=True) / 7.5 + 1e-9
        nearest = np.rint(matrix.T.reshape(3, 32, 24) / even).clip(-8, 7) * even
        mean = [np.square(x.reshape(96, 24) - matrix.T).mean() for x in (plain, nearest)]
        assert mean[0] < 0.85 * mean[1]


def numbers(found: Matrix) -> np.ndarray[Any, Any]:
    """Return the matrix `[in, out]`."""
    zeros, scales, offsets = (np.repeat(x, 32, axis=0) for x in (found.zeros, *found[1:3]))
    return (found.codes.astype(np.float32) - zeros) * scales + offsets


def test_blocks_with_offsets_are_nearly_the_same_in_bytes() -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(-8, 8, (50, 40, 32)).astype(np.int8)
    scales = rng.uniform(0.1, 2, (50, 40, 1)).astype(np.float32)
    around = (scales * rng.normal(0, 2, scales.shape)).astype(np.float32)
    away = (scales * rng.choice([-9, 10, 300, -1e4], scales.shape)).astype(np.float32)
    for offsets in (around, away):  # the second are rounded as numbers are
        blocks = Blocks(codes, scales, offsets)
        found = numbers(join_transposed([widen_to_8_bits(blocks)], (1280, 50), 40))
        error = found - numbers(join_transposed([blocks], (1280, 50), 40))
        largest = np.repeat(np.abs(offsets[..., 0]).T + 8 * scales[..., 0].T, 32, axis=0)
        assert (np.abs(error) <= largest / 250).all()
        if offsets is around:
            steps = error / np.repeat(scales[..., 0].T, 32, axis=0)
            assert np.sqrt(np.mean(steps**2)) < 0.01


def test_a_large_file_has_the_digest_that_b3sum_prints(tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(LARGE + 5)
    found = digests(tmp_path, [tmp_path / "large"], lambda *_: None, "")
    code = "from blake3 import blake3; import sys; d = blake3(); d.update_mmap(sys.argv[1])"
    command = [sys.executable, "-c", code + "; print(d.hexdigest())", str(tmp_path / "large")]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    assert found == {"large": {"blake3": printed, "size": LARGE + 5}}

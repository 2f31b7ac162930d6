"""Casts to 16 bits around what multiplies: what TensorRT is given of a graph."""

from pathlib import Path

import onnx
import onnx_ir as ir
import pytest

from dflash_trt.engines.tensorrt.network import read_operators, to_16_bits
from tests.support.built_pairs import BuildPair

PRODUCTS = {"Attention", "Gemm", "MatMul", "TensorScatter"}
DTYPES = {"bf16": ir.DataType.BFLOAT16, "fp16": ir.DataType.FLOAT16}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("role", ["target", "drafter"])
def test_products_and_caches_are_in_16_bits_and_nothing_else_is(
    built_pair: BuildPair, tmp_path: Path, dtype: str, role: str
) -> None:
    built = built_pair()
    engine = built.target_engine if role == "target" else built.drafter_engine
    before, model = (read_operators(engine / "model.onnx") for _ in range(2))
    to_16_bits(model.graph, DTYPES[dtype])
    ir.external_data.load_to_model(model)
    path = tmp_path / "model.onnx"
    ir.save(model, path)
    onnx.checker.check_model(path, full_check=True)  # all types fit
    inferred = onnx.shape_inference.infer_shapes(onnx.load(path), strict_mode=True).graph
    found = [*inferred.input, *inferred.value_info, *inferred.output]
    types = {value.name: value.type.tensor_type.elem_type for value in found}
    types |= {tensor.name: tensor.data_type for tensor in inferred.initializer}

    floats = {int(DTYPES[dtype]), onnx.TensorProto.FLOAT}
    for node in inferred.node:
        given = [types[name] for name in node.input if types[name] in floats]
        if node.op_type in PRODUCTS:
            assert set(given) == {int(DTYPES[dtype])}
        elif node.op_type in ("RMSNormalization", "RotaryEmbedding", "Add", "Sigmoid", "Softmax"):
            assert set(given) <= {onnx.TensorProto.FLOAT}
    assert {node.op_type for node in inferred.node} >= PRODUCTS - {"MatMul"}
    for old, new in (
        (before.graph.inputs, inferred.input),
        (before.graph.outputs, inferred.output),
    ):
        assert [value.name for value in old] == [value.name for value in new]
        for value in old:
            cache = str(value.name).removeprefix("new_").startswith(("key_", "value_"))
            assert types[str(value.name)] == (DTYPES[dtype] if cache else value.dtype)


def test_only_casts_are_added(built_pair: BuildPair) -> None:
    path = built_pair().target_engine / "model.onnx"
    before, model = read_operators(path), read_operators(path)
    to_16_bits(model.graph, ir.DataType.FLOAT16)
    names = {node.name for node in before.graph}
    added = [node for node in model.graph if node.name not in names]
    assert {node.op_type for node in added} == {"Cast"}
    assert len(model.graph) == len(before.graph) + len(added)
    # a value is cast once, and never there and back
    assert len({node.inputs[0] for node in added}) == len(added)
    assert not any(node.inputs[0].producer() in added for node in added)  # type: ignore[union-attr]

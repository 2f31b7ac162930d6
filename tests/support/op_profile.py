"""The ONNX that ONNX Runtime 1.31 and TensorRT's parser both take, and fuse where it matters."""

from pathlib import Path

import onnx
import onnx_ir as ir

from dflash_trt.engines.tensorrt.network import read_operators
from dflash_trt.graphs.builder import PART_DOMAIN

PROFILE = {
    *("Add", "Attention", "Concat", "Gather", "Gelu", "Gemm", "MatMul", "Mul", "RMSNormalization"),
    *("Reshape", "RotaryEmbedding", "Shape", "Sigmoid", "Slice", "Split", "TensorScatter"),
    *("Cast", "TopK", "Transpose"),
    *("And", "Less", "Range", "Squeeze", "Sub", "Unsqueeze", "Where"),  # windows
    *("Div", "Softmax", "Tanh"),  # soft caps
    *("Equal", "Expand", "Max", "Min", "ReduceSum"),  # experts
    "Pad",  # convolutions
}


def assert_in_profile(path: Path) -> None:
    """Assert that a graph file keeps to the measured profile of ops and their forms."""
    onnx.checker.check_model(path, full_check=True)
    model = onnx.load(path, load_external_data=False)
    assert {(o.domain, o.version) for o in model.opset_import} == {("", 24), (PART_DOMAIN, 1)}
    bodies = [node for function in model.functions for node in function.node]
    assert {node.op_type for node in bodies} <= PROFILE | {"Constant"}
    model = ir.to_proto(read_operators(path))
    assert model.ir_version <= 13
    assert {node.op_type for node in model.graph.node} <= PROFILE
    for node in model.graph.node:
        attributes = {attribute.name for attribute in node.attribute}
        if node.op_type == "Attention":
            # causality is in the mask alone: the parser drops or misreads the rest
            assert attributes == {"scale"}
            assert len(node.input) == 4
            assert len(node.output) == 1
        if node.op_type == "TensorScatter":
            assert node.input[0] in {value.name for value in model.graph.input}
            assert node.output[0] in {value.name for value in model.graph.output}

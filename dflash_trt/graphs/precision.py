"""Casts to 16 bits, for TensorRT, in a graph that computes in float32.

TensorRT computes in the types of the network. ONNX Runtime's CPU kernels need float32, so graphs
are written in float32 and get casts when a plan is built. Weights, inputs of products, attention
and KV caches then have 16 bits; norms, the residual stream, RoPE, softmaxes outside attention, and
all other inputs and outputs stay float32. ONNX Runtime can run the float16 casts (it has no
bfloat16 kernels).
"""

import onnx_ir as ir

PRODUCTS = ("Attention", "Gemm", "MatMul")  # their first three inputs have one type
MOVES = ("Expand", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze")


def to_16_bits(graph: ir.Graph, dtype: ir.DataType) -> None:
    """Insert casts to `dtype`, FLOAT16 or BFLOAT16, and back into a graph of ours."""
    _Casts(graph, dtype).put()


class _Casts:
    def __init__(self, graph: ir.Graph, dtype: ir.DataType) -> None:
        self._graph, self._dtype = graph, dtype
        self._narrow: set[ir.Value] = set()
        self._other: dict[ir.Value, ir.Value] = {}  # by value: its cast to the other type

    def put(self) -> None:
        for node in list(self._graph):
            if node.op_type in PRODUCTS:
                self._take(node, range(min(3, len(node.inputs))), narrow=True)
                self._narrow.update(node.outputs)
            elif node.op_type == "TensorScatter":
                cache, new = node.inputs[0], node.outputs[0]
                assert cache is not None
                cache.type = new.type = ir.TensorType(self._dtype)
                self._take(node, [1], narrow=True)
                self._narrow.update((cache, new))
            elif node.op_type in MOVES and node.inputs[0] in self._narrow:
                self._narrow.update(node.outputs)
            elif _is_weight(node):
                node.attributes.add(ir.AttrInt64("to", int(self._dtype)))
                self._narrow.update(node.outputs)
            else:
                self._take(node, range(len(node.inputs)), narrow=False)
        for index, value in enumerate(self._graph.outputs):
            if value in self._narrow and value.dtype != self._dtype:
                wide = self._cast(value)
                wide.name, value.name = value.name, f"{value.name}_16"
                wide.type, value.type = value.type, ir.TensorType(self._dtype)
                wide.shape = value.shape
                self._graph.outputs[index] = wide

    def _take(self, node: ir.Node, inputs: range | list[int], *, narrow: bool) -> None:
        for index in inputs:
            value = node.inputs[index]
            if value is not None and (value in self._narrow) != narrow:
                node.replace_input_with(index, self._cast(value))

    def _cast(self, value: ir.Value) -> ir.Value:
        if value not in self._other:
            wide = value in self._narrow
            cast = ir.node("Cast", [value], {"to": ir.DataType.FLOAT if wide else self._dtype})
            found, producer = cast.outputs[0], value.producer()
            if producer is None:
                self._graph.insert_before(self._graph[0], cast)
            else:
                self._graph.insert_after(producer, cast)
            if not wide:
                self._narrow.add(found)
            self._other[value], self._other[found] = found, value
        return self._other[value]


def _is_weight(node: ir.Node) -> bool:
    """Return whether this casts a stored weight to float32."""
    value = node.inputs[0] if node.op_type == "Cast" else None
    return value is not None and value.is_initializer()

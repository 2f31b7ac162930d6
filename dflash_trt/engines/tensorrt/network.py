"""Check that TensorRT's parser understood a graph completely.

The parser silently drops some attributes (measured with TensorRT-RTX 1.7: `nonpad_kv_seqlen` and
windows of Attention). So a graph may use only known forms, and each must be found in the parsed
network. Before, `to_16_bits` adds casts for TensorRT to a graph that computes in float32.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes.common import InlinePass, LiftConstantsToInitializersPass

from dflash_trt.engines.tensorrt.library import sizes, trt
from dflash_trt.errors import EngineError

# the parser maps each of these to one layer; any other form would be slower
LAYERS = {
    "Attention": "ATTENTION_OUTPUT",
    "Gemm": "MATRIX_MULTIPLY",
    "MatMul": "MATRIX_MULTIPLY",
    "RotaryEmbedding": "ROTARY_EMBEDDING",
    "TensorScatter": "KV_CACHE_UPDATE",
}
PLUGINS = ("PLUGIN", "PLUGIN_V2", "PLUGIN_V3")
FUSED_HEAD_DIM = 256  # the largest for which TensorRT has an attention kernel


def read_operators(path: Path) -> ir.Model:
    """Read a graph as operators alone: the bodies of its parts are in their places."""
    model = ir.load(path)
    InlinePass()(model)
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    return model


def parse(
    builder: trt.Builder, log: trt.ILogger, model: ir.Model, path: Path
) -> trt.INetworkDefinition:
    """Parse a model whose weights are beside `path`; EngineError naming the failing node."""
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, log)
    if not parser.parse(ir.to_proto(model).SerializeToString(), str(path)):
        first = parser.get_error(0)
        raise _error(f"{first.node_name()} ({first.node_operator()})", first.desc())
    return network


def check_network(network: trt.INetworkDefinition, graph: ir.Graph) -> list[str]:
    """Compare a parsed network with its graph; EngineError naming the first difference.

    Returns attention nodes that the compiler must decompose, because no kernel supports their
    heads; all others must become one kernel each, or building fails.
    """
    layers: dict[str, list[trt.ILayer]] = defaultdict(list)
    attentions: dict[str, trt.IAttention] = {}
    for layer in map(network.get_layer, range(network.num_layers)):
        for name in re.findall(r"\[ONNX Layer: ([^]]*)]", layer.metadata):
            layers[name].append(layer)
        if layer.type.name in PLUGINS:
            raise _error(layer.name, "it became a plugin")
        if layer.type == trt.LayerType.MATRIX_MULTIPLY:
            _check_types(layer)
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionInputLayer
            assert isinstance(layer, trt.IAttentionInputLayer)
            attentions[layer.attention.name] = layer.attention
    for node in graph:
        layers_of_node = layers.get(node.name or "", [])
        types = [layer.type.name for layer in layers_of_node]
        if not layers_of_node:
            raise _error(_label(node), "it is not in the network")
        if node.op_type in LAYERS and types.count(LAYERS[node.op_type]) != 1:
            raise _error(_label(node), f"it became {', '.join(types)}")
        if node.op_type == "TensorScatter":
            _check_update(node, layers_of_node[0])
    _check_ends(network, graph)
    return [
        node.name or ""
        for node in graph
        if node.op_type == "Attention" and _is_taken_apart(node, attentions.get(node.name or ""))
    ]


def check_form(graph: ir.Graph) -> None:
    """Raise EngineError for attributes and inputs that the parser is known to ignore."""
    known = {"Attention": ({"scale"}, 4), "TensorScatter": ({"axis", "mode"}, 3)}
    for node in graph:
        if node.op_type not in known:
            continue
        attributes, inputs = known[node.op_type]
        for name in sorted(node.attributes.keys() - attributes):
            raise _error(_label(node), f"TensorRT reads over its attribute {name}")
        if len(node.inputs) != inputs or None in node.inputs:
            raise _error(_label(node), f"it has {len(node.inputs)} inputs, not these {inputs}")


def _check_types(layer: trt.ILayer) -> None:
    types = {layer.get_input(index).dtype for index in range(2)}
    if types not in ({trt.DataType.HALF}, {trt.DataType.BF16}):
        names = ", ".join(sorted(kind.name for kind in types))
        raise _error(layer.name, f"it multiplies {names}, not 16 bits")


def _check_update(node: ir.Node, layer: trt.ILayer) -> None:
    """Raise EngineError unless a cache update connects a network input and output."""
    cache, new = layer.get_input(0), layer.get_output(0)
    given, taken = node.inputs[0], node.outputs[0]
    assert given is not None
    if not cache.is_network_input or cache.name != given.name:
        raise _error(_label(node), f"its cache {given.name} is not an input of the network")
    if not new.is_network_output or new.name != taken.name:
        raise _error(_label(node), f"its result {taken.name} is not an output of the network")


def _is_taken_apart(node: ir.Node, attention: trt.IAttention | None) -> bool:
    if attention is None:
        raise _error(_label(node), "it did not become an attention layer")
    if attention.mask is None:
        raise _error(_label(node), "its mask is gone")
    if attention.decomposable:
        raise _error(_label(node), "the parser lets it be taken apart")
    unknown = bool(attention.get_input(0).shape[3] > FUSED_HEAD_DIM)
    attention.decomposable = unknown
    return unknown


def _check_ends(network: trt.INetworkDefinition, graph: ir.Graph) -> None:
    inputs = [network.get_input(index) for index in range(network.num_inputs)]
    outputs = [network.get_output(index) for index in range(network.num_outputs)]
    for values, tensors in ((graph.inputs, inputs), (graph.outputs, outputs)):
        present = {tensor.name: describe(tensor) for tensor in tensors}
        for value in values:
            name = str(value.name)
            if name not in present:
                raise _error(name, "it is not in the network")
            assert value.dtype is not None
            assert value.shape is not None
            shape = tuple(size if isinstance(size, int) else -1 for size in value.shape)
            expected = (value.dtype.numpy().name, shape)
            if present[name] != expected:
                raise _error(name, f"it is {present[name]}, not {expected}")
        if len(present) > len(values):
            raise _error(min(present.keys() - {value.name for value in values}), "it is new")


def describe(tensor: trt.ITensor) -> tuple[str, tuple[int, ...]]:
    """Return a tensor's dtype, by its torch and numpy name, and shape, with -1 if dynamic."""
    names = {
        trt.DataType.BF16: "bfloat16",
        trt.DataType.BOOL: "bool",
        trt.DataType.HALF: "float16",
        trt.DataType.FLOAT: "float32",
        trt.DataType.INT64: "int64",
    }
    return names.get(tensor.dtype, tensor.dtype.name), sizes(tensor.shape)


def _label(node: ir.Node) -> str:
    return f"{node.name} ({node.op_type})"


def _error(name: str, what: str) -> EngineError:
    return EngineError(
        f"TensorRT does not have the graph as it is written, at {name}: {what}",
        "Build for kind onnxruntime, and report this pair: its plan would compute something else",
    )


PRODUCTS = ("Attention", "Gemm", "MatMul")  # their first three inputs have one type
MOVES = ("Expand", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze")


def to_16_bits(graph: ir.Graph, dtype: ir.DataType) -> None:
    """Insert casts to `dtype`, FLOAT16 or BFLOAT16, and back into a graph of ours.

    TensorRT computes in the types of the network, ONNX Runtime on CPUs in float32: so graphs
    are written in float32 and get casts when a plan is built. Weights, inputs of products,
    attention and KV caches then have 16 bits; norms, the residual stream, RoPE, softmaxes outside
    attention, and all other inputs and outputs stay float32.
    """
    _Casts(graph, dtype).insert()


class _Casts:
    def __init__(self, graph: ir.Graph, dtype: ir.DataType) -> None:
        self._graph, self._dtype = graph, dtype
        self._narrow: set[ir.Value] = set()
        self._other: dict[ir.Value, ir.Value] = {}  # by value: its cast to the other type

    def insert(self) -> None:
        for node in list(self._graph):
            if node.op_type in PRODUCTS:
                self._cast_inputs(node, range(min(3, len(node.inputs))), narrow=True)
                self._narrow.update(node.outputs)
            elif node.op_type == "TensorScatter":
                cache, new = node.inputs[0], node.outputs[0]
                assert cache is not None
                cache.type = new.type = ir.TensorType(self._dtype)
                self._cast_inputs(node, [1], narrow=True)
                self._narrow.update((cache, new))
            elif node.op_type in MOVES and node.inputs[0] in self._narrow:
                self._narrow.update(node.outputs)
            elif _casts_stored_weight(node):
                node.attributes.add(ir.AttrInt64("to", int(self._dtype)))
                self._narrow.update(node.outputs)
            else:
                self._cast_inputs(node, range(len(node.inputs)), narrow=False)
        for index, value in enumerate(self._graph.outputs):
            if value in self._narrow and value.dtype != self._dtype:
                wide = self._cast(value)
                wide.name, value.name = value.name, f"{value.name}_16"
                wide.type, value.type = value.type, ir.TensorType(self._dtype)
                wide.shape = value.shape
                self._graph.outputs[index] = wide

    def _cast_inputs(self, node: ir.Node, inputs: range | list[int], *, narrow: bool) -> None:
        for index in inputs:
            value = node.inputs[index]
            if value is not None and (value in self._narrow) != narrow:
                node.replace_input_with(index, self._cast(value))

    def _cast(self, value: ir.Value) -> ir.Value:
        if value not in self._other:
            wide = value in self._narrow
            cast = ir.node("Cast", [value], {"to": ir.DataType.FLOAT if wide else self._dtype})
            output = cast.outputs[0]
            producer = value.producer()
            if producer is None:
                self._graph.insert_before(self._graph[0], cast)
            else:
                self._graph.insert_after(producer, cast)
            if not wide:
                self._narrow.add(output)
            self._other[value] = output
            self._other[output] = value
        return self._other[value]


def _casts_stored_weight(node: ir.Node) -> bool:
    value = node.inputs[0] if node.op_type == "Cast" else None
    return value is not None and value.is_initializer()

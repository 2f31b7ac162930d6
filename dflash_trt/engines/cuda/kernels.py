"""Check that every node of a graph has a kernel in the CUDA provider.

ONNX Runtime keeps size computations on the CPU by design, so its own option,
`session.disable_cpu_ep_fallback`, refuses every graph of ours (seen with 1.31.1).
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort

from dflash_trt.engines.cuda import PROVIDER
from dflash_trt.errors import EngineError
from dflash_trt.files import read_yaml_beside

FIX = "Leave out engine.device, or use an engine of kind tensorrt or tensorrt_llm on this GPU"
INSTALL = (
    "Run: pip uninstall --yes onnxruntime onnxruntime-gpu && "
    "pip install 'onnxruntime-gpu[cuda,cudnn]>=1.31,<1.32'"  # both packages write the same files
)


def check_graph(path: Path) -> None:
    """Raise EngineError for the first node of a graph file that has no kernel on a GPU."""
    table = _table()
    for node, types in _nodes(path):
        if types not in table["kernels"].get(node.op_type, ()):
            raise EngineError(
                f"{node.name} ({node.op_type} of {types}) would run on the CPU: ONNX Runtime "
                f"{table['version']} is not known to have a kernel for it on a GPU",
                FIX,
            )


def check_placement(session: ort.InferenceSession, path: Path) -> None:
    """Raise EngineError unless a session, which must record its assignment, runs on the GPU."""
    if PROVIDER not in session.get_providers():
        raise EngineError("ONNX Runtime cannot load its CUDA provider here", INSTALL)
    # these may be computed on the CPU
    sizes = {node.name for node, types in _nodes(path) if {*types.split()} == {"int64"}}
    for part in session.get_provider_graph_assignment_info():
        for node in part.get_nodes():
            if part.ep_name != PROVIDER and node.name not in sizes:
                raise EngineError(
                    f"ONNX Runtime {ort.__version__} would run {node.name} ({node.op_type}) on the "
                    "CPU",
                    FIX,
                )


def _nodes(path: Path) -> Iterator[tuple[onnx.NodeProto, str]]:
    """Yield the nodes of a graph file, each with its input types as the table writes them.

    Nodes with only weights as inputs are skipped: ONNX Runtime computes them when loading.
    """
    graph = onnx.shape_inference.infer_shapes(onnx.load(path, load_external_data=False)).graph
    values = (*graph.input, *graph.output, *graph.value_info)
    types = {value.name: value.type.tensor_type.elem_type for value in values}
    types |= {weight.name: weight.data_type for weight in graph.initializer}
    known = {weight.name for weight in graph.initializer}
    for node in graph.node:
        if known.issuperset(node.input):
            known.update(node.output)
            continue
        inputs = node.input[:1] if node.op_type == "Concat" else node.input
        names = (onnx.TensorProto.DataType.Name(types.get(name, 0)) for name in inputs)
        yield node, " ".join(names).lower()


@cache
def _table() -> Any:
    return read_yaml_beside(__file__, "kernels.yaml")

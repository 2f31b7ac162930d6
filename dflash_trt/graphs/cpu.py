"""What only ONNX Runtime's CPU kernels want: one pass over the standard graph."""

import onnx_ir as ir

from dflash_trt.graphs.builder import OPSET

MICROSOFT = "com.microsoft"
# ONNX Runtime 1.31 and 1.32 have a kernel for it in this domain. Of the standard's one 1.32 makes a
# loop of small products, which takes ten times as long a token; 1.31 does not know it. Both are
# exact: a row's bits depend on it alone
LINEAR_ATTENTION = "LinearAttention"


def use_cpu_kernels(graph: ir.Graph) -> None:
    """Use ONNX Runtime's `LinearAttention`, and the opset that is enough without the standard's.

    Opset 25 has a new `Attention`, for which ONNX Runtime 1.32 has no kernel either: taken apart it
    takes ten times as long.
    """
    nodes = [node for node in graph.all_nodes() if node.op_type == LINEAR_ATTENTION]
    for node in nodes:
        node.domain = MICROSOFT
    if nodes:
        graph.opset_imports.update({"": OPSET, MICROSOFT: 1})

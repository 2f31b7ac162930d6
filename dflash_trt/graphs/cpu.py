"""What only ONNX Runtime's CPU kernels want: one pass over the standard graph."""

import onnx_ir as ir

MICROSOFT = "com.microsoft"
# in its own domain ONNX Runtime 1.32 has a kernel for it; the standard's one is a loop of small
# products, which takes ten times as long a token. Both are exact: a row's bits depend on it alone
FASTER = ("LinearAttention",)


def use_cpu_kernels(graph: ir.Graph) -> None:
    """Replace nodes by those of ONNX Runtime's domain that compute the same."""
    nodes = [node for node in graph.all_nodes() if node.op_type in FASTER and not node.domain]
    for node in nodes:
        node.domain = MICROSOFT
    if nodes:
        graph.opset_imports[MICROSOFT] = 1

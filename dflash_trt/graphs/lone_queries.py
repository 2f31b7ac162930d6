"""Attention of a quantized target: what a query finds must not depend on how many a step has.

ONNX Runtime has another kernel for a product of one row than of more (`engines/least_rows.py`).
"""

from collections.abc import Callable

import onnx_ir as ir

from dflash_trt.graphs.builder import GraphBuilder
from dflash_trt.graphs.layers import Layer
from dflash_trt.graphs.positions import Positions

Attend = Callable[[ir.Value, ir.Value], ir.Value]


def in_several_rows(
    g: GraphBuilder, layer: Layer, at: Positions, q: ir.Value, mask: ir.Value, attend: Attend
) -> ir.Value:
    """`attend(q, mask)`, q `[n, heads, Q, head_dim]`, by products of two rows or more.

    Query heads that share a kv head become rows of one product, so that keys are read once for all
    of them. Where none do, the last query comes twice.
    """
    heads, kv_heads = g.spec.num_attention_heads, layer.spec.num_key_value_heads
    if heads == kv_heads:
        mixed = attend(*(at.with_last_twice(g, x) for x in (q, mask)))
        return g.op("Slice", mixed, g.ints(0), g.ints(-1), g.ints(2))
    if g.spec.attn_logit_softcapping is not None or g.spec.sinks is not None:
        return attend(q, mask)  # which does so itself
    q = g.op("Reshape", q, g.ints(0, kv_heads, -1, layer.spec.head_dim))
    mixed = attend(q, at.repeated(g, mask, heads // kv_heads))
    return g.op("Reshape", mixed, g.ints(0, heads, -1, layer.spec.head_dim))

"""Self-attention over a KV cache that is written in place."""

from collections.abc import Callable
from functools import partial

import numpy as np
import onnx_ir as ir

from dflash_trt.graphs.builder import GraphBuilder
from dflash_trt.graphs.dflash2 import convolve_after, convolve_before
from dflash_trt.graphs.layers import Layer, linear, rms_norm, softcap
from dflash_trt.graphs.positions import Positions

Attend = Callable[[ir.Value, ir.Value], ir.Value]
MASKED = -6e4  # masked score, within float16


def attention_block(
    g: GraphBuilder, layer: Layer, hidden: ir.Value, context: ir.Value | None, at: Positions
) -> ir.Value:
    """Build self-attention with residual; `hidden` is `[n * Q, hidden_size]`.

    `context` `[n, C, hidden_size]`, if given, is injected: it passes only through k_proj and
    v_proj, before the block's own keys and values (DFlash, KV injection).
    """
    attn = f"{layer.prefix}self_attn"
    stored = ("k",) if layer.spec.value_is_key else ("k", "v")
    heads = g.spec.num_attention_heads
    kv_heads = layer.spec.num_key_value_heads
    gate: ir.Value | None = None
    x = rms_norm(g, hidden, f"{layer.prefix}input_layernorm")
    x, kernel = convolve_before(g, layer, "attention_conv", x, at)
    if context is None:
        qkv = _project_heads(g, layer, x, at.queries, at, "q", *stored)
        q, *kv = g.split(qkv, [_query_heads(g)] + [kv_heads] * len(stored), axis=1)
        if g.spec.attention_gate:
            q, gate = _every_other_head(g, q)
    else:
        q = _project_heads(g, layer, x, at.queries, at, "q")
        block = at.by_sequence(g, x, at.queries, g.spec.hidden_size)
        both = g.op("Concat", context, block, axis=1)
        both = g.op("Reshape", both, g.ints(-1, g.spec.hidden_size))
        both = _project_heads(g, layer, both, at.keys, at, "k", "v")
        kv = [*g.split(both, (kv_heads, kv_heads), axis=1)]
    k = kv[0]
    v = kv[-1]
    if g.spec.qk_norm:
        q = rms_norm(g, q, f"{attn}.q_norm")
        k = rms_norm(g, k, f"{attn}.k_norm")
    if g.spec.value_norm:
        ones = g.constant(f"{attn}.v_norm", np.ones(layer.spec.head_dim, np.float32))
        v = g.op("RMSNormalization", v, ones, axis=-1, epsilon=g.spec.rms_norm_eps)
    q = at.rotate(g, layer.spec, q, at.queries)
    k = at.rotate(g, layer.spec, k, at.keys)
    keys = _write(g, layer, "key", k, at)
    values = _write(g, layer, "value", v, at)
    attend = partial(_attend, g, layer, keys, values)
    mask = at.layer_mask(g, layer.spec)
    if context is None and g.quantized:
        mixed = _in_several_rows(g, layer, at, q, mask, attend)
    else:
        mixed = attend(q, mask)
    if gate is not None:
        mixed = g.op("Mul", mixed, g.op("Sigmoid", gate))
    mixed = g.op("Transpose", mixed, perm=(0, 2, 1, 3))
    mixed = g.op("Reshape", mixed, g.ints(-1, heads * layer.spec.head_dim))
    out = linear(g, mixed, f"{attn}.o_proj", bias="o" in g.spec.biases)
    if g.spec.sandwich_norms:
        out = rms_norm(g, out, f"{layer.prefix}post_attention_layernorm")
    return g.op("Add", hidden, convolve_after(g, layer, out, kernel, at))


def _attend(
    g: GraphBuilder, layer: Layer, keys: ir.Value, values: ir.Value, q: ir.Value, mask: ir.Value
) -> ir.Value:
    """Build attention of queries `[n, heads, Q, head_dim]`; returns the same shape.

    Uses the Attention op, or separate nodes for what it cannot do: soft caps on scores (TensorRT's
    parser refuses the op's own) and sinks `[heads]`, the scores of an extra key without value
    (gpt-oss).
    """
    heads = g.spec.num_attention_heads
    kv_heads = layer.spec.num_key_value_heads
    scale = g.spec.attention_scale or layer.spec.head_dim**-0.5
    cap = g.spec.attn_logit_softcapping
    sinks = None
    if cap is None and g.spec.sinks is None:
        return g.op("Attention", q, keys, values, mask, scale=scale)
    if g.spec.sinks is not None:
        sinks = g.vector(f"{layer.prefix}self_attn.{g.spec.sinks}")
    q = g.op("Mul", q, g.number(scale))
    # query heads of one kv head are rows of one product, so keys are not repeated
    folded = g.ints(0, kv_heads, -1, 0)
    unfolded = g.ints(0, heads, -1, 0)
    q = g.op("Reshape", q, folded)
    scores = g.op("MatMul", q, g.op("Transpose", keys, perm=(0, 1, 3, 2)))
    if cap is not None:
        scores = softcap(g, scores, cap)
    scores = g.op("Where", mask, g.op("Reshape", scores, unfolded), g.number(MASKED))
    if sinks is not None:
        sinks = g.op("Reshape", sinks, g.ints(1, heads, 1, 1))
        shape = g.op("Concat", g.op("Shape", mask, end=3), g.ints(1), axis=0)
        # in front: the order of the sum must not depend on the number of masked keys
        scores = g.op("Concat", g.op("Expand", sinks, shape), scores, axis=-1)
    shares = g.op("Softmax", scores, axis=-1)
    if sinks is not None:
        end = g.op("Shape", shares, start=3)
        shares = g.op("Slice", shares, g.ints(1), end, g.ints(3))
    mixed = g.op("MatMul", g.op("Reshape", shares, folded), values)
    return g.op("Reshape", mixed, unfolded)


def _in_several_rows(
    g: GraphBuilder, layer: Layer, at: Positions, q: ir.Value, mask: ir.Value, attend: Attend
) -> ir.Value:
    """Build `attend(q, mask)` with products of two rows or more; q `[n, heads, Q, head_dim]`.

    A quantized target's results must not depend on the number of queries in a step, and ONNX
    Runtime has another kernel for products of one row (see `engines.onnxruntime.least_rows`). Query
    heads of one kv head become rows of one product, which reads keys once. If heads are not shared,
    the last query is repeated.
    """
    heads = g.spec.num_attention_heads
    kv_heads = layer.spec.num_key_value_heads
    if heads == kv_heads:
        mixed = attend(at.with_last_twice(g, q), at.with_last_twice(g, mask))
        return g.op("Slice", mixed, g.ints(0), g.ints(-1), g.ints(2))
    if g.spec.attn_logit_softcapping is not None or g.spec.sinks is not None:
        return attend(q, mask)  # it already uses several rows
    q = g.op("Reshape", q, g.ints(0, kv_heads, -1, layer.spec.head_dim))
    mixed = attend(q, at.repeated(g, mask, heads // kv_heads))
    return g.op("Reshape", mixed, g.ints(0, heads, -1, layer.spec.head_dim))


def _project_heads(
    g: GraphBuilder, layer: Layer, x: ir.Value, where: ir.Value, at: Positions, *which: str
) -> ir.Value:
    """Project tokens at positions `where` `[n, S]`: `[n * S, H]` to `[n, heads, S, head_dim]`."""
    names = [f"{layer.prefix}self_attn.{projection}_proj" for projection in which]
    out = linear(g, x, *names, bias=which[0] in g.spec.biases)
    # not -1: TensorRT's parser cannot infer the number of heads
    heads = 0
    for projection in which:
        heads += _query_heads(g) if projection == "q" else layer.spec.num_key_value_heads
    out = at.by_sequence(g, out, where, heads, layer.spec.head_dim)
    return g.op("Transpose", out, perm=(0, 2, 1, 3))


def _query_heads(g: GraphBuilder) -> int:
    """Return the heads of q_proj, whose gates are as many more."""
    return g.spec.num_attention_heads * (2 if g.spec.attention_gate else 1)


def _every_other_head(g: GraphBuilder, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Separate queries and gates, which take turns: `[n, 2 * heads, S, head_dim]`."""
    end = g.ints(_query_heads(g))
    axis = g.ints(1)
    step = g.ints(2)
    queries = g.op("Slice", x, g.ints(0), end, axis, step)
    return queries, g.op("Slice", x, g.ints(1), end, axis, step)


def _write(g: GraphBuilder, layer: Layer, name: str, rows: ir.Value, at: Positions) -> ir.Value:
    """Write rows into the cache "key" or "value" in place; return the rows that the mask covers."""
    cache = layer.caches[name]
    full = g.op("TensorScatter", cache, rows, at.write_index, axis=-2, mode="linear")
    layer.update(g, name, full)
    return g.op("Slice", full, g.ints(0), at.visible, g.ints(2))

"""Self-attention over a KV cache that is written in place."""

from functools import partial
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from dflash_trt.graphs.builder import Attribute, GraphBuilder
from dflash_trt.graphs.dflash2 import convolve_after, convolve_before
from dflash_trt.graphs.layers import Layer, linear, norm_scale, rms_norm, softcap
from dflash_trt.graphs.positions import Positions

MASKED = -6e4  # masked score, within float16


class Norms(NamedTuple):
    """Scales of the norms of heads; None: not normed."""

    q: ir.Value | None
    k: ir.Value | None
    v: ir.Value | None


class Heads(NamedTuple):
    q: ir.Value  # [n, heads, S, head_dim]
    keys: ir.Value  # the whole caches
    values: ir.Value
    gate: ir.Value | None  # of attention's output, shaped as q


def attention_block(
    g: GraphBuilder, layer: Layer, hidden: ir.Value, context: ir.Value | None, at: Positions
) -> ir.Value:
    """Build self-attention with residual; `hidden` is `[n * Q, hidden_size]`.

    `context` `[n, C, hidden_size]`, if given, is injected: it passes only through k_proj and
    v_proj, before the block's own keys and values (DFlash, KV injection).
    """
    attn = f"{layer.prefix}self_attn"
    x = rms_norm(g, hidden, f"{layer.prefix}input_layernorm")
    x, kernel = convolve_before(g, layer, "attention_conv", x, at)
    heads = _heads(g, layer, x, context, at)
    # a quantized target's results must not depend on the number of queries in a step
    several = context is None and g.quantized
    mixed = _mixed_heads(g, layer, heads, at, in_several_rows=several)
    out = linear(g, mixed, f"{attn}.o_proj", bias="o" in g.spec.biases)
    if g.spec.sandwich_norms:
        out = rms_norm(g, out, f"{layer.prefix}post_attention_layernorm")
    return g.op("Add", hidden, convolve_after(g, layer, out, kernel))


# --- heads ----------------------------------------------------------------------------------------


def _heads(
    g: GraphBuilder, layer: Layer, x: ir.Value, context: ir.Value | None, at: Positions
) -> Heads:
    """Project heads of tokens `[T, hidden_size]`, and write keys and values into their caches."""
    if context is None:
        stored = ("k",) if layer.spec.value_is_key else ("k", "v")
        product = _project(g, layer, x, "q", *stored)
        stored_product = None
    else:
        block = at.by_sequence(g, x, at.queries, g.spec.hidden_size)
        both = g.op("Concat", context, block, axis=1)
        both = g.op("Reshape", both, g.ints(-1, g.spec.hidden_size))
        product = _project(g, layer, x, "q")
        stored_product = _project(g, layer, both, "k", "v")
    q, keys, values, *gate = g.parts(
        "AttentionInput",
        _attention_input,
        product,
        stored_product,
        *_norms(g, layer),
        *at.rope_tables(g, layer.spec),
        at.queries,
        at.keys,
        at.write_index,
        layer.caches["key"],
        layer.caches["value"],
        heads=g.spec.num_attention_heads,
        kv_heads=layer.spec.num_key_value_heads,
        head_dim=layer.spec.head_dim,
        rotated=layer.spec.rope.dim,
        epsilon=g.spec.rms_norm_eps,
        gated=int(g.spec.attention_gate),
        value_is_key=int(layer.spec.value_is_key),
    )
    layer.update(g, "key", keys)
    layer.update(g, "value", values)
    return Heads(q, keys, values, gate[0] if gate else None)


def _project(g: GraphBuilder, layer: Layer, x: ir.Value, *which: str) -> ir.Value:
    names = [f"{layer.prefix}self_attn.{projection}_proj" for projection in which]
    return linear(g, x, *names, bias=which[0] in g.spec.biases)


def _norms(g: GraphBuilder, layer: Layer) -> Norms:
    attn = f"{layer.prefix}self_attn"
    q = k = v = None
    if g.spec.qk_norm:
        q = norm_scale(g, f"{attn}.q_norm")
        k = norm_scale(g, f"{attn}.k_norm")
    if g.spec.value_norm:
        v = g.constant(f"{attn}.v_norm", np.ones(layer.spec.head_dim, np.float32))
    return Norms(q, k, v)


def _attention_input(
    g: GraphBuilder,
    x: ir.Value,
    stored: ir.Value | None,
    q_norm: ir.Value | None,
    k_norm: ir.Value | None,
    v_norm: ir.Value | None,
    cosines: ir.Value,
    sines: ir.Value,
    positions: ir.Value,
    stored_positions: ir.Value,
    write_index: ir.Value,
    keys: ir.Value,
    values: ir.Value,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    rotated: int,
    epsilon: float,
    gated: int,
    value_is_key: int,
) -> list[ir.Value]:
    """Split, norm and rotate heads, and write keys and values into their caches.

    x: `[n * S, all heads]`, queries and, unless `stored` has them, keys and values of the same
    tokens. Returns queries `[n, heads, S, head_dim]`, both caches and, if gated, the gates that
    take turns with the queries.
    """
    counts = [heads * 2 if gated else heads]
    kv_counts = [kv_heads] if value_is_key else [kv_heads, kv_heads]
    if stored is None:
        both = _by_head(g, x, positions, sum(counts + kv_counts), head_dim)
        q, *kv = g.split(both, counts + kv_counts, axis=1)
    else:
        q = _by_head(g, x, positions, heads, head_dim)
        both = _by_head(g, stored, stored_positions, sum(kv_counts), head_dim)
        kv = [*g.split(both, kv_counts, axis=1)]
    gate = []
    if gated:
        end = g.ints(*counts)
        gate = [g.op("Slice", q, g.ints(1), end, g.ints(1), g.ints(2))]
        q = g.op("Slice", q, g.ints(0), end, g.ints(1), g.ints(2))
    partly = {} if rotated == head_dim else {"rotary_embedding_dim": rotated}
    q = _norm(g, q, q_norm, epsilon)
    q = g.op("RotaryEmbedding", q, cosines, sines, positions, **partly)
    k = _norm(g, kv[0], k_norm, epsilon)
    k = g.op("RotaryEmbedding", k, cosines, sines, stored_positions, **partly)
    v = _norm(g, kv[-1], v_norm, epsilon)
    return [q, _write(g, keys, k, write_index), _write(g, values, v, write_index), *gate]


def _by_head(
    g: GraphBuilder, x: ir.Value, positions: ir.Value, heads: int, head_dim: int
) -> ir.Value:
    # not -1: TensorRT's parser cannot infer the number of heads
    shape = g.op("Concat", g.op("Shape", positions), g.ints(heads, head_dim), axis=0)
    return g.op("Transpose", g.op("Reshape", x, shape), perm=(0, 2, 1, 3))


def _norm(g: GraphBuilder, x: ir.Value, scale: ir.Value | None, epsilon: float) -> ir.Value:
    if scale is None:
        return x
    return g.op("RMSNormalization", x, scale, axis=-1, epsilon=epsilon)


def _write(g: GraphBuilder, cache: ir.Value, heads: ir.Value, write_index: ir.Value) -> ir.Value:
    return g.op("TensorScatter", cache, heads, write_index, axis=-2, mode="linear")


# --- attention ------------------------------------------------------------------------------------


def _mixed_heads(
    g: GraphBuilder, layer: Layer, given: Heads, at: Positions, *, in_several_rows: bool
) -> ir.Value:
    """Attend; return the heads of each token side by side, `[n * S, heads * head_dim]`."""
    heads = g.spec.num_attention_heads
    kv_heads = layer.spec.num_key_value_heads
    mask = at.layer_mask(g, layer.spec)
    cap = g.spec.attn_logit_softcapping
    sinks = g.vector(f"{layer.prefix}self_attn.{g.spec.sinks}") if g.spec.sinks else None
    attributes: dict[str, Attribute] = {
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": layer.spec.head_dim,
        "scale": g.spec.attention_scale or layer.spec.head_dim**-0.5,
    }
    if cap is not None:
        attributes["cap"] = cap
    q, keys, values, gate = given
    inputs = (q, keys, values, mask, sinks, gate)
    # written out, heads that share keys are several rows already
    is_written_out = cap is not None or sinks is not None
    if in_several_rows and (heads == kv_heads or not is_written_out):
        body = partial(_attend, in_several_rows=True)
        return g.part("AttendInSeveralRows", body, *inputs, **attributes)
    return g.part("Attend", _attend, *inputs, **attributes)


def _attend(
    g: GraphBuilder,
    q: ir.Value,
    keys: ir.Value,
    values: ir.Value,
    mask: ir.Value,
    sinks: ir.Value | None,
    gate: ir.Value | None,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    scale: float,
    cap: float | None = None,
    in_several_rows: bool = False,
) -> ir.Value:
    """Attend to the first entries of caches, those of `mask`: `[n * S, heads * head_dim]`.

    sinks: float32 `[heads]`, scores of an extra key without value (gpt-oss). gate: of each number,
    before its sigmoid, as queries are.
    """
    keys = _visible(g, keys, mask)
    values = _visible(g, values, mask)
    if in_several_rows:
        mixed = _mix_in_several_rows(
            g, q, keys, values, mask, sinks, heads, kv_heads, head_dim, scale, cap
        )
    else:
        mixed = _mix(g, q, keys, values, mask, sinks, heads, kv_heads, scale, cap)
    return _in_rows(g, mixed, gate, heads * head_dim)


def _mix(
    g: GraphBuilder,
    q: ir.Value,
    keys: ir.Value,
    values: ir.Value,
    mask: ir.Value,
    sinks: ir.Value | None,
    heads: int,
    kv_heads: int,
    scale: float,
    cap: float | None,
) -> ir.Value:
    """Use the Attention op, or separate nodes for what it cannot do.

    These are sinks, and soft caps: TensorRT's parser refuses the op's own.
    """
    if cap is None and sinks is None:
        return g.op("Attention", q, keys, values, mask, scale=scale)
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


def _mix_in_several_rows(
    g: GraphBuilder,
    q: ir.Value,
    keys: ir.Value,
    values: ir.Value,
    mask: ir.Value,
    sinks: ir.Value | None,
    heads: int,
    kv_heads: int,
    head_dim: int,
    scale: float,
    cap: float | None,
) -> ir.Value:
    """Mix as `_mix` does, with products of two rows or more.

    ONNX Runtime has another kernel for products of one row (`engines.onnxruntime.least_tokens`).
    Query heads of one kv head become rows of one product, which reads keys once. If heads are not
    shared, the last query is repeated.
    """
    if heads == kv_heads:
        twice = [
            g.op("Concat", x, g.op("Gather", x, g.ints(-1), axis=2), axis=2) for x in (q, mask)
        ]
        mixed = _mix(g, twice[0], keys, values, twice[1], sinks, heads, kv_heads, scale, cap)
        return g.op("Slice", mixed, g.ints(0), g.ints(-1), g.ints(2))
    q = g.op("Reshape", q, g.ints(0, kv_heads, -1, head_dim))
    mask = g.op("Concat", *[mask] * (heads // kv_heads), axis=2)
    mixed = g.op("Attention", q, keys, values, mask, scale=scale)
    return g.op("Reshape", mixed, g.ints(0, heads, -1, head_dim))


def _visible(g: GraphBuilder, cache: ir.Value, mask: ir.Value) -> ir.Value:
    """Return the entries of a cache that the mask covers."""
    return g.op("Slice", cache, g.ints(0), g.op("Shape", mask, start=3, end=4), g.ints(2))


def _in_rows(g: GraphBuilder, mixed: ir.Value, gate: ir.Value | None, size: int) -> ir.Value:
    """Return the heads of each token side by side, `[n * S, size]`."""
    if gate is not None:
        mixed = g.op("Mul", mixed, g.op("Sigmoid", gate))
    mixed = g.op("Transpose", mixed, perm=(0, 2, 1, 3))
    return g.op("Reshape", mixed, g.ints(-1, size))

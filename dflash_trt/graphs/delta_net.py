"""Gated DeltaNet: linear attention over a state that never holds a rejected draft.

A step folds in what the last one left open. `LinearAttention` runs once over the last drafts that
were accepted and this step's known tokens, and writes the state; if there are drafts, it runs once
more over them, from that state, and the result is dropped. So rolling back is a count.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from dflash_trt.checkpoints import DeltaNet
from dflash_trt.graphs.builder import GraphBuilder
from dflash_trt.graphs.layers import Layer, linear, rms_norm, silu
from dflash_trt.graphs.positions import Positions
from dflash_trt.weights import Weights

NORM_EPSILON = 1e-6  # of the norms of queries and keys (transformers `l2norm`)
END = 2**62  # of a slice


class Inputs(NamedTuple):
    """What a layer projects, for each token."""

    mixed: ir.Value  # queries, keys and values side by side
    z: ir.Value  # gate of the output
    beta: ir.Value
    alpha: ir.Value  # of the decay


class Tokens(NamedTuple):
    """What the recurrence reads of tokens; S of them in each of n sequences."""

    keys: ir.Value  # [n, S, keys], of norm 1
    values: ir.Value  # [n, S, values]
    decays: ir.Value  # [n, S, num_value_heads], logarithms of factors on the state
    betas: ir.Value  # [n, S, num_value_heads], how much of the state is replaced


@dataclass(frozen=True)
class Rollback:
    """What a step says of its tokens and of the last drafts, shared by all layers."""

    known: ir.Value  # int64 [1]: K, tokens of each sequence before its drafts
    replayed: ir.Value  # int64 [1]: P, the most drafts that a sequence accepted last time
    folded: ir.Value  # int64 [1]: P + K
    counts: ir.Value  # float32 [n, P + K, 1]: 0 for a draft that was rejected, else 1
    window: ir.Value  # int64 [n, kernel_size - 1, 1]: kept inputs before the first new token
    has_drafts: ir.Value  # bool []


def open_rollback(g: GraphBuilder, tokens: ir.Value) -> Rollback:
    """Declare the inputs known int64 `[1]` and accepted int64 `[n]`, see `Rollback`."""
    known = g.input("known", ir.DataType.INT64, (1,))
    accepted = g.input("accepted", ir.DataType.INT64, ("n",))
    zero = g.constant("scalar_0", np.array(0, np.int64))
    one = g.constant("scalar_1", np.array(1, np.int64))
    accepted = g.op("Unsqueeze", accepted, g.ints(1))
    replayed = g.op("ReduceMax", accepted, g.ints(0), keepdims=0)
    folded = g.op("Add", replayed, known)
    place = g.op("Range", zero, g.op("Squeeze", folded, g.ints(0)), one)
    place = g.op("Unsqueeze", place, g.ints(0))
    is_known = g.op("Less", g.op("Sub", replayed, g.ints(1)), place)
    counts = g.op("Or", is_known, g.op("Less", place, accepted))
    counts = g.op("Cast", g.op("Unsqueeze", counts, g.ints(2)), to=ir.DataType.FLOAT)
    before = g.spec.delta_nets[0].kernel_size - 1
    window = g.op("Add", accepted, g.ints(*range(before)))
    has_drafts = g.op("Less", known, g.op("Shape", tokens, start=1, end=2))
    return Rollback(
        known=known,
        replayed=replayed,
        folded=folded,
        counts=counts,
        window=g.op("Unsqueeze", window, g.ints(2)),
        has_drafts=g.op("Squeeze", has_drafts, g.ints(0)),
    )


def delta_net_block(
    g: GraphBuilder, layer: Layer, hidden: ir.Value, at: Positions, rollback: Rollback
) -> ir.Value:
    """Build a Gated DeltaNet with residual; `hidden` is `[n * S, hidden_size]`."""
    net = layer.spec.delta_net
    prefix = f"{layer.prefix}linear_attn"
    assert net is not None
    x = rms_norm(g, hidden, f"{layer.prefix}input_layernorm")
    project = _project_grouped if net.grouped else _project
    inputs = project(g, net, prefix, x)
    mixed = at.by_sequence(g, inputs.mixed, at.queries, net.channels)
    mixed = _convolve(g, layer, net, mixed, rollback)
    queries, keys, values = g.split(mixed, (net.keys, net.keys, net.values), axis=2)
    keys = _unit_norm(g, net, keys)
    alpha = at.by_sequence(g, inputs.alpha, at.queries, net.num_value_heads)
    bias = g.vector(f"{prefix}.dt_bias")
    decays = g.part("Decays", _decays, alpha, bias, _rates(g, prefix))
    beta = at.by_sequence(g, inputs.beta, at.queries, net.num_value_heads)
    tokens = Tokens(keys, values, decays, betas=g.op("Sigmoid", beta))
    out = _recur(g, layer, net, _unit_norm(g, net, queries), tokens, rollback)
    out = g.part(
        "GatedNorm",
        _gated_norm,
        out,
        g.vector(f"{prefix}.norm.weight"),
        inputs.z,
        heads=net.num_value_heads,
        size=net.value_dim,
        epsilon=g.spec.rms_norm_eps,
    )
    return g.op("Add", hidden, linear(g, out, f"{prefix}.out_proj", bias=False))


def _project(g: GraphBuilder, net: DeltaNet, prefix: str, x: ir.Value) -> Inputs:
    """Project tokens `[T, hidden_size]`, as Qwen3.5 does."""
    heads = net.num_value_heads
    wide = linear(g, x, f"{prefix}.in_proj_qkv", f"{prefix}.in_proj_z", bias=False)
    mixed, z = g.split(wide, (net.channels, net.values), axis=1)
    # exact: few columns, which decide how long the state remembers
    gates = linear(g, x, f"{prefix}.in_proj_b", f"{prefix}.in_proj_a", bias=False, exact=True)
    beta, alpha = g.split(gates, (heads, heads), axis=1)
    return Inputs(mixed, z, beta, alpha)


def _project_grouped(g: GraphBuilder, net: DeltaNet, prefix: str, x: ir.Value) -> Inputs:
    """Do the same for Qwen3-Next, whose projections have all of a key head side by side."""
    shared = net.num_value_heads // net.num_key_heads
    value = shared * net.value_dim

    def by_kind(x: ir.Value, *sizes: int) -> Sequence[ir.Value]:
        x = g.op("Reshape", x, g.ints(-1, net.num_key_heads, sum(sizes)))
        parts = g.split(x, sizes, axis=2)
        return [
            g.op("Reshape", part, g.ints(-1, net.num_key_heads * size))
            for part, size in zip(parts, sizes, strict=True)
        ]

    wide = linear(g, x, f"{prefix}.in_proj_qkvz", bias=False)
    *mixed, z = by_kind(wide, net.key_dim, net.key_dim, value, value)
    gates = linear(g, x, f"{prefix}.in_proj_ba", bias=False, exact=True)
    beta, alpha = by_kind(gates, shared, shared)
    return Inputs(g.op("Concat", *mixed, axis=1), z, beta, alpha)


def _gated_norm(
    g: GraphBuilder,
    x: ir.Value,
    scale: ir.Value,
    z: ir.Value,
    *,
    heads: int,
    size: int,
    epsilon: float,
) -> ir.Value:
    """Norm the heads of `[n, S, values]`, and multiply them by SiLU of their gate z `[T, values]`.

    Returns `[T, values]`.
    """
    x = g.op("Reshape", x, g.ints(0, 0, heads, size))
    x = g.op("RMSNormalization", x, scale, axis=-1, epsilon=epsilon)
    return g.op("Mul", g.op("Reshape", x, g.ints(-1, heads * size)), silu(g, z))


def _convolve(
    g: GraphBuilder, layer: Layer, net: DeltaNet, x: ir.Value, rollback: Rollback
) -> ir.Value:
    """Convolve `[n, S, channels]` with the inputs before; keeps those of the drafts."""
    cache = layer.caches["inputs"]
    name = f"{layer.prefix}linear_attn.conv1d.weight"
    before = g.op("GatherND", cache, rollback.window, batch_dims=1)
    x = g.op("Concat", before, x, axis=1)
    last_inputs = g.op("Slice", x, rollback.known, g.ints(END), g.ints(1))
    layer.update(g, "inputs", g.op("TensorScatter", cache, last_inputs, axis=-2, mode="linear"))
    read = partial(_read_taps, g.weights, name)
    weights = g.lazy(name, (net.kernel_size, net.channels), read)
    return g.part("Convolve", _weigh_and_activate, x, weights, taps=net.kernel_size)


def _weigh_and_activate(g: GraphBuilder, x: ir.Value, weights: ir.Value, *, taps: int) -> ir.Value:
    """Build the causal convolution of `[n, taps - 1 + S, channels]`, and SiLU: `[n, S, channels]`.

    weights: `[taps, channels]`, the last of the token itself. Written out: ONNX Runtime's
    `CausalConvWithState` has another kernel for one token.
    """
    weighed = []
    for tap, weight in enumerate(g.ops("Split", weights, outputs=taps, axis=0, num_outputs=taps)):
        end = tap - taps + 1 or END
        shifted = g.op("Slice", x, g.ints(tap), g.ints(end), g.ints(1))
        weighed.append(g.op("Mul", shifted, weight))
    return silu(g, g.op("Sum", *weighed))


def _read_taps(weights: Weights, name: str) -> npt.NDArray[np.float32]:
    return weights.read(name)[:, 0].T.astype(np.float32)


def _unit_norm(g: GraphBuilder, net: DeltaNet, x: ir.Value) -> ir.Value:
    """Give each key head of `[n, S, keys]` the norm 1."""
    size = net.key_dim
    scale = g.filled("key_scale", size, size**-0.5)
    x = g.op("Reshape", x, g.ints(0, 0, net.num_key_heads, size))
    x = g.op("RMSNormalization", x, scale, axis=-1, epsilon=NORM_EPSILON / size)
    return g.op("Reshape", x, g.ints(0, 0, net.keys))


def _rates(g: GraphBuilder, prefix: str) -> ir.Value:
    name = f"{prefix}.A_log"

    def read() -> npt.NDArray[np.float32]:
        return -np.exp(g.weights.read(name).astype(np.float32))

    return g.lazy(name, g.weights.shape(name), read)


def _decays(g: GraphBuilder, alpha: ir.Value, bias: ir.Value, rates: ir.Value) -> ir.Value:
    """Build rates times softplus(alpha + bias).

    The softplus is written out: the last bit of ONNX Runtime's `Softplus` and `Log` depends on a
    number's place among the others, so that a token's would depend on its neighbors.
    """
    x = g.op("Add", alpha, bias)
    small = g.op("Exp", g.op("Neg", g.op("Abs", x)))
    # log(1 + small) = 2 atanh(small / (2 + small))
    half = g.op("Atanh", g.op("Div", small, g.op("Add", small, g.number(2.0))))
    softplus = g.op("Add", g.op("Relu", x), g.op("Add", half, half))
    return g.op("Mul", softplus, rates)


def _recur(
    g: GraphBuilder,
    layer: Layer,
    net: DeltaNet,
    queries: ir.Value,
    tokens: Tokens,
    rollback: Rollback,
) -> ir.Value:
    """Build both runs over the state; queries `[n, S, keys]`; returns `[n, S, values]`."""
    drafts_before = layer.caches["drafts"]
    after = g.ints(END)
    last = g.op("Slice", drafts_before, g.ints(0), rollback.replayed, g.ints(1))
    both = g.op("Concat", last, g.op("Concat", *tokens, axis=2), axis=1)
    # of `both`, so that the last drafts are read before they are overwritten
    drafts = g.op("Slice", both, rollback.folded, after, g.ints(1))
    layer.update(g, "drafts", g.op("TensorScatter", drafts_before, drafts, axis=-2, mode="linear"))
    folded = _tokens(g, net, g.op("Slice", both, g.ints(0), rollback.folded, g.ints(1)))
    # outputs of replayed drafts are unused, so any queries will do: their keys
    asking = g.op("Slice", folded.keys, g.ints(0), rollback.replayed, g.ints(1))
    known = g.op("Slice", queries, g.ints(0), rollback.known, g.ints(1))
    known = g.op("Concat", asking, known, axis=1)
    out, state = _read(g, net, known, folded, layer.caches["state"], rollback.counts)
    layer.update(g, "state", state)
    out = g.op("Slice", out, rollback.replayed, after, g.ints(1))

    def with_drafts() -> ir.Value:
        asking = g.op("Slice", queries, rollback.known, after, g.ints(1))
        drafted, _ = _read(g, net, asking, _tokens(g, net, drafts), state, None)
        return g.op("Concat", out, drafted, axis=1)

    def without() -> ir.Value:
        return g.op("Identity", out)

    return g.when(rollback.has_drafts, f"drafts_{layer.index}", with_drafts, without)


def _tokens(g: GraphBuilder, net: DeltaNet, x: ir.Value) -> Tokens:
    """Take tokens apart that are stored side by side."""
    heads = net.num_value_heads
    return Tokens(*g.split(x, (net.keys, net.values, heads, heads), axis=2))


def _read(
    g: GraphBuilder,
    net: DeltaNet,
    queries: ir.Value,
    tokens: Tokens,
    state: ir.Value,
    counts: ir.Value | None,
) -> Sequence[ir.Value]:
    """Return what tokens read, `[n, S, values]`, and the state after them."""
    return g.parts(
        "Recur",
        _recurrence,
        queries,
        *tokens,
        state,
        counts,
        key_heads=net.num_key_heads,
        key_dim=net.key_dim,
        value_heads=net.num_value_heads,
        tiled=int(net.tiled),
    )


def _recurrence(
    g: GraphBuilder,
    queries: ir.Value,
    keys: ir.Value,
    values: ir.Value,
    decays: ir.Value,
    betas: ir.Value,
    state: ir.Value,
    counts: ir.Value | None,
    *,
    key_heads: int,
    key_dim: int,
    value_heads: int,
    tiled: int,
) -> Sequence[ir.Value]:
    """Run the gated delta rule; counts `[n, S, 1]`: 0 for a token that leaves the state as it is.

    tiled: key heads take turns over the value heads; else each has some side by side.
    """
    shared = value_heads // key_heads

    def repeat(x: ir.Value) -> ir.Value:
        if shared == 1:
            return x
        x = g.op("Reshape", x, g.ints(0, 0, key_heads, key_dim))
        x = g.op("Concat", *[x] * shared, axis=2 if tiled else 3)
        return g.op("Reshape", x, g.ints(0, 0, value_heads * key_dim))

    if counts is not None:
        decays = g.op("Mul", decays, counts)
        betas = g.op("Mul", betas, counts)
    # Of the standard's operator ONNX Runtime 1.32 makes a loop of small products, which takes ten
    # times as long a token; 1.31 does not know it. Both are exact: a row's bits depend on it alone
    ops = g.runtime_ops if g.facts.runtime_operators else g.ops
    return ops(
        "LinearAttention",
        repeat(queries),
        repeat(keys),
        values,
        state,
        decays,
        betas,
        outputs=2,
        update_rule="gated_delta",
        q_num_heads=value_heads,
        kv_num_heads=value_heads,
        scale=key_dim**-0.5,
    )

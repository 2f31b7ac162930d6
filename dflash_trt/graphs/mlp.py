"""Gated MLPs, and mixtures of experts."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from dflash_trt.checkpoints import Experts
from dflash_trt.graphs.builder import DTYPES, GraphBuilder
from dflash_trt.graphs.dflash2 import convolve_after, convolve_before
from dflash_trt.graphs.layers import Layer, gate, linear, product, rms_norm
from dflash_trt.graphs.positions import Positions
from dflash_trt.weights import Weights

Array = npt.NDArray[Any]
Half = Literal["gate_up", "down"]  # of an expert


class Routed(NamedTuple):
    tokens: ir.Value  # float32 [T, hidden_size]
    chosen: ir.Value  # int64 [T, per_token]
    share: ir.Value  # float32 [T, per_token], weight of each
    shared_gate: ir.Value | None = None  # float32 [T, 1], before its sigmoid


def _route(g: GraphBuilder, layer: Layer, experts: Experts, x: ir.Value) -> Routed:
    biased = experts.clamped is not None
    name = "router" if biased else "gate"
    router = f"{layer.prefix}mlp.{name}"
    shared_gate: ir.Value | None = None
    if experts.shared is None:
        scores = linear(g, x, router, bias=biased, exact=True)
    else:  # one product: kernels for a single column are others
        gate = f"{layer.prefix}mlp.shared_expert_gate"
        gates = linear(g, x, router, gate, bias=False, exact=True)
        scores, shared_gate = g.split(gates, (experts.count, 1), axis=1)
    if not experts.normalized:
        scores = g.op("Softmax", scores, axis=-1)
    share, chosen = g.ops("TopK", scores, g.ints(experts.per_token), outputs=2, axis=-1)
    if experts.normalized:  # equals the softmax over all experts, normalized over the chosen ones
        share = g.op("Softmax", share, axis=-1)
    return Routed(x, chosen, share, shared_gate)


def _chosen_experts(g: GraphBuilder, layer: Layer, experts: Experts, routed: Routed) -> ir.Value:
    """Sort tokens by expert, split them per expert, and restore their order."""
    pairs = g.op("Reshape", routed.chosen, g.ints(-1))  # expert of each token and choice
    count = g.op("Shape", pairs)
    expert, order = g.ops("TopK", pairs, count, outputs=2, axis=0, largest=0)
    sizes = g.op("Equal", g.op("Unsqueeze", pairs, g.ints(1)), g.ints(*range(experts.count)))
    sizes = g.op("Cast", sizes, to=ir.DataType.INT64)
    sizes = g.op("ReduceSum", sizes, g.ints(0), keepdims=0)

    # only the products are per expert, to keep graphs of 128 experts a layer small
    def multiply(x: ir.Value, half: Half) -> ir.Value:
        pieces = g.ops("Split", x, sizes, outputs=experts.count, axis=0)
        out = g.op("Concat", *_multiply_each(g, layer, experts, half, pieces), axis=0)
        if experts.clamped is None:
            return out
        return g.op("Add", out, g.op("Gather", _biases(g, layer, half), expert, axis=0))

    token = g.op("Div", order, g.ints(experts.per_token))
    wide = multiply(g.op("Gather", routed.tokens, token, axis=0), "gate_up")
    out = multiply(_apply_gate(g, experts, wide), "down")
    _, place = g.ops("TopK", order, count, outputs=2, axis=0, largest=0)
    out = g.op("Gather", out, place, axis=0)
    out = g.op("Reshape", out, g.ints(-1, experts.per_token, g.spec.hidden_size))
    out = g.op("Mul", out, g.op("Unsqueeze", routed.share, g.ints(2)))
    return g.op("ReduceSum", out, g.ints(1), keepdims=0)


def _all_experts(g: GraphBuilder, layer: Layer, experts: Experts, routed: Routed) -> ir.Value:
    """Compute all experts in one batched product; experts not chosen have weight 0."""

    def multiply(x: ir.Value, half: Half) -> ir.Value:
        stack = _stack(g, layer, experts, half)
        out = g.part("ExpertProduct", _expert_product, x, stack, share)
        if experts.clamped is None:
            return out
        return g.op("Add", out, g.op("Unsqueeze", _biases(g, layer, half), g.ints(1)))

    # shares first: kernels leave out experts that nobody chose
    chosen = g.op("Unsqueeze", routed.chosen, g.ints(2))
    chosen = g.op("Equal", chosen, g.ints(*range(experts.count)))  # [T, per_token, E]
    share = g.op("Unsqueeze", routed.share, g.ints(2))
    share = g.op("ReduceSum", g.op("Where", chosen, share, g.number(0.0)), g.ints(1), keepdims=0)
    share = g.op("Unsqueeze", g.op("Transpose", share, perm=(1, 0)), g.ints(2))  # [E, T, 1]
    wide = multiply(g.op("Unsqueeze", routed.tokens, g.ints(0)), "gate_up")  # [E, T, 2 wide]
    out = multiply(_apply_gate(g, experts, wide), "down")
    return g.part("ExpertSum", _expert_sum, out, share)


def _expert_product(g: GraphBuilder, x: ir.Value, stack: ir.Value, shares: ir.Value) -> ir.Value:
    """Multiply tokens `[1 or E, T, in]` by experts `[E, in, out]`: `[E, T, out]`.

    shares `[E, T, 1]`: results where they are 0 are not used.
    """
    return g.op("MatMul", x, stack)


def _expert_sum(g: GraphBuilder, x: ir.Value, shares: ir.Value) -> ir.Value:
    """Add up what experts make of tokens, `[E, T, hidden_size]`, times their shares `[E, T, 1]`."""
    return g.op("ReduceSum", g.op("Mul", x, shares), g.ints(0), keepdims=0)


def _apply_gate(g: GraphBuilder, experts: Experts | None, x: ir.Value) -> ir.Value:
    """Return the input of the down projection; `x` has gate and up side by side."""
    if experts is None or experts.clamped is None:
        return gate(g, x)
    alpha, limit = experts.clamped
    return g.part("ClampedGate", _clamped_gate, x, alpha=alpha, limit=limit)


def _clamped_gate(g: GraphBuilder, x: ir.Value, *, alpha: float, limit: float) -> ir.Value:
    gate, up = g.ops("Split", x, outputs=2, axis=-1, num_outputs=2)
    gate = g.op("Min", gate, g.number(limit))
    up = g.op("Max", g.op("Min", up, g.number(limit)), g.number(-limit))
    gate = g.op("Mul", gate, g.op("Sigmoid", g.op("Mul", gate, g.number(alpha))))
    return g.op("Mul", g.op("Add", up, g.number(1.0)), gate)


def _shared_expert(g: GraphBuilder, layer: Layer, routed: Routed) -> ir.Value:
    """Build the expert that every token has, times a gate of its own."""
    assert routed.shared_gate is not None
    mlp = f"{layer.prefix}mlp.shared_expert"
    x = linear(g, routed.tokens, f"{mlp}.gate_proj", f"{mlp}.up_proj", bias=False)
    out = linear(g, gate(g, x), f"{mlp}.down_proj", bias=False)
    return g.op("Mul", out, g.op("Sigmoid", routed.shared_gate))


def _multiply_each(
    g: GraphBuilder, layer: Layer, experts: Experts, half: Half, pieces: Sequence[ir.Value]
) -> list[ir.Value]:
    names = [_tensor_names(layer, experts, half, index) for index in range(experts.count)]
    if experts.clamped is not None:
        [name] = names[0]  # of all experts
        by_name = g.weights.experts_in_blocks(name)
        one_by_one = [_names_of_one(layer, half, index) for index in range(experts.count)]
        if one_by_one[0][0] in by_name.names and g.block_form(by_name, one_by_one[0][0], None):
            return _multiply_blocks_each(g, by_name, pieces, one_by_one)
        shape = g.weights.shape(name)[1:]
        dtype = DTYPES[g.weights.dtype(name)]
        outs = []
        for i, x in enumerate(pieces):
            read = partial(_read_separated, g.weights, name, i)
            matrix = g.float32(g.lazy(f"{name}.{i}", shape, read, dtype), dtype)
            outs.append(g.op("MatMul", x, matrix))
        return outs
    matrices = [[f"{name}.weight" for name in layers] for layers in names]
    if g.block_form(g.weights, matrices[0][0], None) is not None:
        return _multiply_blocks_each(g, g.weights, pieces, matrices)
    if g.weights.dtype(matrices[0][0]) == "F32":
        # exact: results must not depend on how many tokens share an expert
        return [
            linear(g, x, *layers, bias=False, exact=True)
            for x, layers in zip(pieces, names, strict=True)
        ]
    # one Cast for all: thousands of them slow down loading
    stack = g.rows(g.weights, [name for layers in matrices for name in layers])
    split = g.ops("Split", stack, outputs=experts.count, axis=0, num_outputs=experts.count)
    return [g.op("Gemm", x, matrix, transB=1) for x, matrix in zip(pieces, split, strict=True)]


def _multiply_blocks_each(
    g: GraphBuilder,
    weights: Weights,
    pieces: Sequence[ir.Value],
    names: Sequence[Sequence[str]],
) -> list[ir.Value]:
    """Multiply the tokens of each expert by its matrices in blocks, with the first token twice.

    So no token is alone: for one row ONNX Runtime has another kernel. No tokens stay none.
    """
    outs = []
    for x, matrices in zip(pieces, names, strict=True):
        first = g.op("Slice", x, g.ints(0), g.ints(1), g.ints(0))
        more = g.op("Concat", x, first, axis=0)
        out = product(g, weights, more, matrices, None)
        outs.append(g.op("Slice", out, g.ints(0), g.ints(-1), g.ints(0)))
    return outs


def _names_of_one(layer: Layer, half: Half, index: int) -> list[str]:
    """Return the names of an expert's matrices, where each has tensors of its own."""
    prefix = f"{layer.prefix}mlp.experts.{index}"
    return [f"{prefix}.{part}_proj.weight" for part in half.split("_")]


def _stack(g: GraphBuilder, layer: Layer, experts: Experts, half: Half) -> ir.Value:
    """Return all experts' matrices, `[E, in, out]`."""
    hidden = g.spec.hidden_size
    wide = layer.spec.intermediate_size
    shape = (experts.count, wide, hidden)
    if half == "gate_up":
        shape = (experts.count, hidden, 2 * wide)
    first = _tensor_names(layer, experts, half, 0)[0]
    stored = first if experts.clamped is not None else f"{first}.weight"
    dtype = DTYPES[g.weights.dtype(stored)] if g.facts.experts_as_stored else ir.DataType.FLOAT

    def read() -> Array:
        stack = np.empty(shape, dtype.numpy())
        for index, matrix in enumerate(stack):
            names = _tensor_names(layer, experts, half, index)
            if experts.clamped is None:
                matrix[:] = np.concatenate([g.weights.read(f"{name}.weight") for name in names]).T
            else:
                matrix[:] = _read_separated(g.weights, names[0], index)
        return stack

    return g.float32(g.lazy(f"{layer.prefix}mlp.experts.{half}", shape, read, dtype), dtype)


def _tensor_names(layer: Layer, experts: Experts, half: Half, index: int) -> list[str]:
    """Return Qwen's linear layers of one expert, or gpt-oss' tensor of all, `[E, in, out]`."""
    prefix = f"{layer.prefix}mlp.experts"
    if experts.clamped is not None:
        return [f"{prefix}.{half}_proj"]
    return [f"{prefix}.{index}.{part}_proj" for part in half.split("_")]


def _biases(g: GraphBuilder, layer: Layer, half: Half) -> ir.Value:
    """Return gpt-oss' biases `[E, out]`."""
    name = f"{layer.prefix}mlp.experts.{half}_proj_bias"

    def read() -> Array:
        return _read_separated(g.weights, name, None).astype(np.float32)

    return g.lazy(name, g.weights.shape(name), read)


def _read_separated(weights: Weights, name: str, index: int | None) -> Array:
    """Read gpt-oss' tensor of one expert or all, with interleaved gate and up separated."""
    tensor = weights.read(name, index)
    if "gate_up" not in name:
        return tensor
    bits = tensor.view(f"u{tensor.itemsize}")  # numpy is slow with dtypes of extensions
    bits = np.concatenate([bits[..., ::2], bits[..., 1::2]], axis=-1)
    return bits.view(tensor.dtype)


def mlp_block(g: GraphBuilder, layer: Layer, hidden: ir.Value, at: Positions) -> ir.Value:
    """Build a gated MLP or mixture with residual; `hidden` is `[T, hidden_size]`."""
    mlp = f"{layer.prefix}mlp"
    norm = "pre_feedforward" if g.spec.sandwich_norms else "post_attention"
    x = rms_norm(g, hidden, f"{layer.prefix}{norm}_layernorm")
    x, kernel = convolve_before(g, layer, "mlp_conv", x, at)
    experts = layer.spec.experts
    if experts is not None:
        # on a GPU no shape depends on data: there all experts compute all tokens
        mixture = _chosen_experts if g.facts.data_dependent_shapes else _all_experts
        routed = _route(g, layer, experts, x)
        out = mixture(g, layer, experts, routed)
        if experts.shared is not None:
            out = g.op("Add", out, _shared_expert(g, layer, routed))
    else:
        x = linear(g, x, f"{mlp}.gate_proj", f"{mlp}.up_proj", bias=False)
        x = _apply_gate(g, None, x)
        out = linear(g, x, f"{mlp}.down_proj", bias=False)
    if g.spec.sandwich_norms:
        out = rms_norm(g, out, f"{layer.prefix}post_feedforward_layernorm")
    return g.op("Add", hidden, convolve_after(g, layer, out, kernel))

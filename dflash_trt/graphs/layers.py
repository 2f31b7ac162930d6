"""Layer parts shared by target and drafter."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import onnx_ir as ir

from dflash_trt.checkpoints import LayerSpec
from dflash_trt.config import Bits
from dflash_trt.graphs.builder import GraphBuilder
from dflash_trt.weights import Weights


@dataclass(frozen=True)
class Layer:
    index: int  # of its caches: among the layers that have such
    spec: LayerSpec
    prefix: str  # of its tensors' names
    caches: dict[str, ir.Value]  # inputs "key" and "value", or those of `StateShapes`

    def update(self, g: GraphBuilder, name: str, value: ir.Value) -> None:
        """Make `value` the output that is bound to the memory of the cache `name`."""
        shape = self.caches[name].shape
        assert shape is not None
        g.output(value, f"new_{name}_{self.index}", ir.DataType.FLOAT, shape)


class Table(NamedTuple):
    """A tensor `[vocab, hidden_size]`, the drafter's or its target's."""

    weights: Weights
    name: str


class Best(NamedTuple):
    hidden: ir.Value  # `[r, hidden_size]`, normed
    ids: ir.Value  # int64 `[r, best]`: tokens of the largest logits
    logits: ir.Value  # `[r, best]`


def open_layer(g: GraphBuilder, index: int, cache_len: int, most_drafts: int = 0) -> Layer:
    """Declare the cache inputs of one layer: `[n, kv_heads, cache_len, head_dim]`, or a state."""
    layer = g.spec.layers[index]
    recurrent = layer.delta_net is not None
    entries = (layer.num_key_value_heads, cache_len, layer.head_dim)
    shapes: dict[str, tuple[int, ...]] = {"key": entries, "value": entries}
    if layer.delta_net is not None:
        shapes = layer.delta_net.state_shapes(most_drafts)._asdict()
    number = sum((other.delta_net is not None) == recurrent for other in g.spec.layers[:index])
    caches = {
        name: g.input(f"{name}_{number}", ir.DataType.FLOAT, ("n", *shape))
        for name, shape in shapes.items()
    }
    return Layer(number, layer, f"{g.spec.prefix}layers.{index}.", caches)


def embed(g: GraphBuilder, table: Table, tokens: ir.Value) -> ir.Value:
    """Embed tokens int64 `[n, S]` by a table `[vocab, hidden_size]`, scaled: `[T, hidden_size]`."""
    hidden = g.embed(table.weights, table.name, g.op("Reshape", tokens, g.ints(-1)))
    if g.spec.embedding_scale == 1:
        return hidden
    return g.op("Mul", hidden, g.number(g.spec.embedding_scale))


def rms_norm(g: GraphBuilder, x: ir.Value, name: str) -> ir.Value:
    return g.op("RMSNormalization", x, norm_scale(g, name), axis=-1, epsilon=g.spec.rms_norm_eps)


def norm_scale(g: GraphBuilder, name: str) -> ir.Value:
    return g.vector(f"{name}.weight", g.spec.norm_offset)


def head(
    g: GraphBuilder,
    hidden: ir.Value,
    table: Table,
    scored: ir.Value,
    best: int,
    token_ids: ir.Value | None = None,
) -> Best:
    """Build the final norm and output head for `r` hidden states; declares the outputs.

    hidden `[T, hidden_size]`; scored int64 `[r]`, hidden states that get logits; token_ids int64
    `[vocab]`, if the table's rows are not the tokens in order. Outputs: logits float32 `[r,
    vocab]`, and each one's `best` largest in descending order as top_ids int64 (tokens) and
    top_logits float32 `[r, best]`.
    """
    x = rms_norm(g, g.op("Gather", hidden, scored, axis=0), f"{g.spec.prefix}norm")
    # int8 even if other layers are int4: on the demo pair int8 here adds nothing to their error
    # (5.3 % rms), int4 a seventh of it
    logits = product(g, table.weights, x, [table.name], 8 if g.storage.bits else None)
    if g.spec.output_multiplier != 1:
        logits = g.op("Mul", logits, g.number(g.spec.output_multiplier))
    if g.spec.final_logit_softcapping is not None:
        logits = softcap(g, logits, g.spec.final_logit_softcapping)
    # TopK even for one: ONNX Runtime's ArgMax is slower
    values, ids = g.ops("TopK", logits, g.ints(best), outputs=2, axis=-1)
    if token_ids is not None:
        ids = g.op("Gather", token_ids, ids, axis=0)
    g.output(logits, "logits", ir.DataType.FLOAT, ("r", g.spec.num_logits))
    g.output(ids, "top_ids", ir.DataType.INT64, ("r", best))
    g.output(values, "top_logits", ir.DataType.FLOAT, ("r", best))
    return Best(x, ids, values)


def softcap(g: GraphBuilder, x: ir.Value, cap: float) -> ir.Value:
    bound = g.number(cap)
    return g.op("Mul", g.op("Tanh", g.op("Div", x, bound)), bound)


def linear(g: GraphBuilder, x: ir.Value, *names: str, bias: bool, exact: bool = False) -> ir.Value:
    """Build linear layers side by side: `[T, in]` to `[T, sum of outs]`; exact: never quantized."""
    biases = []
    if bias:
        biases.append(g.bias(*[f"{name}.bias" for name in names]))
    matrices = [f"{name}.weight" for name in names]
    if exact:
        return g.op("Gemm", x, g.rows(g.weights, matrices), *biases, transB=1)
    rows = g.fp8_rows(g.weights, matrices) if g.storage.fp8 or g.storage.keep_fp8 else None
    if rows is not None:
        return g.op("Gemm", x, rows, *biases, transB=1)
    return product(g, g.weights, x, matrices, g.storage.bits, biases)


def product(
    g: GraphBuilder,
    weights: Weights,
    x: ir.Value,
    names: Sequence[str],
    bits: Bits | None,
    biases: Sequence[ir.Value] = (),
) -> ir.Value:
    """Multiply `[T, in]` by matrices `[out, in]`: `[T, sum of outs]`."""
    if bits == 8 and g.storage.int8_inputs:
        out = g.multiply_in_int8(weights, x, names)
        return g.op("Add", out, *biases) if biases else out
    forms = [g.block_form(weights, name, bits) for name in names]
    if not any(forms):
        return g.op("Gemm", x, g.rows(weights, names), *biases, transB=1)
    parts = []
    for form, group in groupby(zip(forms, names, strict=True), key=itemgetter(0)):
        same = [name for _, name in group]
        if form is None:
            parts.append(g.op("Gemm", x, g.rows(weights, same), transB=1))
        else:
            parts.append(g.multiply_blocks(weights, x, same, form))
    out = g.op("Concat", *parts, axis=-1) if len(parts) > 1 else parts[0]
    return g.op("Add", out, *biases) if biases else out


def gate(g: GraphBuilder, x: ir.Value) -> ir.Value:
    """Gate up by the activation of gate; `x` `[..., 2 * size]` has gate and up side by side."""
    return g.part("Gate", _gate, x, activation=g.spec.hidden_act)


def _gate(g: GraphBuilder, x: ir.Value, *, activation: str) -> ir.Value:
    gate, up = g.ops("Split", x, outputs=2, axis=-1, num_outputs=2)
    active = silu(g, gate) if activation == "silu" else g.op("Gelu", gate, approximate="tanh")
    return g.op("Mul", active, up)


def silu(g: GraphBuilder, x: ir.Value) -> ir.Value:
    return g.op("Mul", x, g.op("Sigmoid", x))

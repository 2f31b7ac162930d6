"""LiLiCorr's head: all candidates of a block see each other before pairs of them are scored.

`LiLiCorrHead` of TensorRT-LLM's `modeling_lilicorr.py`; its scores are those of DFlash 2's selector
in kind, so that what follows is the same.
"""

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from dflash_trt.checkpoints import Corrector
from dflash_trt.graphs.builder import GraphBuilder
from dflash_trt.graphs.collectives import look_up
from dflash_trt.graphs.layers import Best, linear, rms_norm

PREFIX = "lilicorr."
LAYER_NORM_EPS = 1e-5  # torch's own


def lattice_scores(
    g: GraphBuilder,
    head: Corrector,
    block_size: int,
    block: ir.Value,
    anchor: ir.Value,
    table: ir.Value,
    best: Best,
) -> None:
    """Declare the output pair_scores float32 `[r, k, k]`, as `selector.pair_scores` does.

    block int64 `[n, W]`; anchor `[n, hidden_size]`: the context feature of the last token before
    the block's; table: embeddings `[vocab, hidden_size]`; best: of r rows, as many first masks of
    each of n blocks.
    """
    k, own, vocab = head.top_k, head.hidden_size, g.spec.vocab_size
    n = g.op("Shape", block, start=0, end=1)
    likely = g.op("Sub", best.logits, g.op("ReduceLogSumExp", best.all_logits, g.ints(-1)))
    tokens = look_up(g, table, g.op("Reshape", best.ids, g.ints(-1)), vocab)
    if own != g.spec.hidden_size:
        tokens = _linear(g, tokens, "token_proj")
    states = g.op("Reshape", _linear(g, best.hidden, "pass_hidden_proj"), g.ints(-1, 1, own))
    x = g.op("Add", g.op("Reshape", tokens, g.ints(-1, k, own)), states)
    x = g.op("Add", x, g.op("Reshape", _features(g, likely, k), g.ints(-1, k, own)))
    x = g.op("Reshape", x, g.op("Concat", n, g.ints(-1, k, own), axis=0))  # [n, D, k, own]
    slots = g.op("Shape", x, start=1, end=2)
    places = g.op("Reshape", g.vector(f"{PREFIX}slot_embedding"), g.ints(1, -1, 1, own))
    places = g.op("Slice", places, g.ints(0), slots, g.ints(1))
    ranks = g.op("Reshape", g.vector(f"{PREFIX}rank_embedding"), g.ints(1, 1, k, own))
    x = g.op("Add", g.op("Add", x, places), ranks)
    lattice = g.op("Concat", n, g.op("Mul", slots, g.ints(k)), g.ints(own), axis=0)
    whole = g.op("Shape", x)
    x = g.op("Reshape", x, g.ints(-1, own))
    bias = _bias(g, head, block_size, g.op("Mul", slots, g.ints(k)))
    for i in range(head.layers):
        at = f"{PREFIX}layers.{i}."
        seen = rms_norm(g, x, f"{at}attn_norm")
        x = g.op("Add", x, _attention(g, head, f"{at}attn", seen, lattice, bias))
        wide = _silu(g, _linear(g, rms_norm(g, x, f"{at}mlp_norm"), f"layers.{i}.mlp.0"))
        x = g.op("Add", x, _linear(g, wide, f"layers.{i}.mlp.2"))
    x = rms_norm(g, x, f"{PREFIX}output_norm")
    before = rms_norm(g, _linear(g, anchor, "context_proj"), f"{PREFIX}anchor_norm")
    x = g.op("Reshape", x, whole)
    each = g.op("Expand", g.op("Unsqueeze", before, g.ints(1, 2)), whole)
    factors = g.op("Concat", x, each, g.op("Mul", x, each), axis=-1)
    factors = g.op("Reshape", factors, g.ints(-1, 3 * own))
    factors = _silu(g, _linear(g, factors, "factor_input_proj"))
    split = g.op("Concat", n, g.ints(-1, k, head.factor_dim), axis=0)
    going, coming = (
        g.op("Reshape", _unit(g, _linear(g, factors, name), head.vector_eps), split)
        for name in ("out_head", "in_head")
    )
    first = _unit(g, _linear(g, before, "anchor_out_head"), head.vector_eps)
    # at a block's first mask the anchor goes, whatever the candidate
    first = g.op("Reshape", first, g.op("Concat", n, g.ints(1, 1, head.factor_dim), axis=0))
    shape = g.op("Concat", n, g.ints(1, k, head.factor_dim), axis=0)
    going = g.op("Slice", going, g.ints(0), g.ints(-1), g.ints(1))
    going = g.op("Concat", g.op("Expand", first, shape), going, axis=1)
    scores = g.op("MatMul", going, g.op("Transpose", coming, perm=(0, 1, 3, 2)))
    scores = g.op("Mul", g.op("Reshape", scores, g.ints(-1, k, k)), g.number(head.logit_scale))
    g.output(scores, "pair_scores", ir.DataType.FLOAT, ("r", k, k))


def feature_before(g: GraphBuilder, context: ir.Value, positions: ir.Value) -> ir.Value:
    """The context feature right before each block, `[n, hidden_size]`: rejected ones and padding
    come after it."""
    length = g.op("Shape", context, start=1, end=2)
    places = g.op("Slice", positions, g.ints(0), length, g.ints(1))
    first = g.op("Slice", positions, length, g.op("Add", length, g.ints(1)), g.ints(1))
    ours = g.op("Equal", places, g.op("Sub", first, g.ints(1)))
    ours = g.op("Unsqueeze", g.op("Cast", ours, to=ir.DataType.FLOAT), g.ints(1))
    return g.op("Reshape", g.op("MatMul", ours, context), g.ints(-1, g.spec.hidden_size))


def _features(g: GraphBuilder, likely: ir.Value, k: int) -> ir.Value:
    """Of log-probabilities `[r, k]`, best first, `[r * k, hidden]`."""
    rank = np.arange(k, dtype=np.float32) / max(k - 1, 1)
    fixed = np.stack([rank, np.arange(k) == 0], axis=-1).astype(np.float32)[None]
    behind = g.op("Sub", likely, g.op("Slice", likely, g.ints(0), g.ints(1), g.ints(1)))
    columns = [g.op("Unsqueeze", x, g.ints(2)) for x in (likely, g.op("Exp", likely), behind)]
    rows = g.op("Concat", g.op("Shape", likely), g.ints(2), axis=0)
    columns.append(g.op("Expand", g.constant("lilicorr_ranks", fixed), rows))
    x = g.op("Reshape", g.op("Concat", *columns, axis=-1), g.ints(-1, 5))
    weight, bias = (g.vector(f"{PREFIX}feature_mlp.0.{name}") for name in ("weight", "bias"))
    x = g.op("LayerNormalization", x, weight, bias, axis=-1, epsilon=LAYER_NORM_EPS)
    return _linear(g, _silu(g, _linear(g, x, "feature_mlp.1")), "feature_mlp.3")


def _bias(g: GraphBuilder, head: Corrector, block_size: int, size: ir.Value) -> ir.Value:
    """On the scores of attention, `[1, heads, D * k, D * k]`: how many masks lie between."""
    whole = (1, head.heads, *[(block_size - 1) * head.top_k] * 2)

    def compute() -> npt.NDArray[np.generic]:
        names = (f"{PREFIX}relative_slot_bias", f"{PREFIX}same_slot_bias")
        by_distance, same = (g.weights.read(name).astype(np.float32) for name in names)
        places = np.repeat(np.arange(block_size - 1), head.top_k)
        apart = places[:, None] - places[None, :]
        found = by_distance[:, apart + block_size - 1] + (apart == 0) * same[:, None, None]
        bias: npt.NDArray[np.float32] = found.reshape(whole).astype(np.float32)
        return bias

    found = g.lazy(f"{PREFIX}attention_bias", whole, compute)
    return g.op("Slice", found, g.ints(0, 0), g.op("Concat", size, size, axis=0), g.ints(2, 3))


def _attention(
    g: GraphBuilder, head: Corrector, name: str, x: ir.Value, lattice: ir.Value, bias: ir.Value
) -> ir.Value:
    """Of all candidates of a block: x and the result `[n * D * k, hidden]`."""
    dim = head.hidden_size // head.heads
    weight = g.rows(g.weights, [f"{name}.in_proj_weight"])
    x = g.op("Gemm", x, weight, g.bias(f"{name}.in_proj_bias"), transB=1)
    parts = g.split(x, [head.hidden_size] * 3, axis=-1)
    by_head = (
        g.op("Reshape", g.op("Reshape", x, lattice), g.ints(0, 0, head.heads, dim)) for x in parts
    )
    query, key, value = (
        g.op("Transpose", x, perm=(0, 2, 3, 1) if i == 1 else (0, 2, 1, 3))
        for i, x in enumerate(by_head)
    )
    scores = g.op("Mul", g.op("MatMul", query, key), g.number(dim**-0.5))
    seen = g.op("MatMul", g.op("Softmax", g.op("Add", scores, bias), axis=-1), value)
    seen = g.op("Reshape", g.op("Transpose", seen, perm=(0, 2, 1, 3)), g.ints(-1, head.hidden_size))
    return linear(g, seen, f"{name}.out_proj", bias=True, exact=True)


def _linear(g: GraphBuilder, x: ir.Value, name: str) -> ir.Value:
    return linear(g, x, f"{PREFIX}{name}", bias=True, exact=True)


def _silu(g: GraphBuilder, x: ir.Value) -> ir.Value:
    return g.op("Mul", x, g.op("Sigmoid", x))


def _unit(g: GraphBuilder, x: ir.Value, eps: float) -> ir.Value:
    """Rows of length 1."""
    length = g.op("ReduceL2", x, g.ints(-1))
    return g.op("Div", x, g.op("Max", length, g.number(eps)))

"""DFlash 2's candidate selector: how well each candidate follows each one before it."""

import onnx_ir as ir

from dflash_trt.checkpoints import Selector
from dflash_trt.graphs.builder import GraphBuilder
from dflash_trt.graphs.layers import Best, linear

PREFIX = "candidate_selector."


def pair_scores(
    g: GraphBuilder,
    selector: Selector,
    block: ir.Value,
    best: Best,
) -> None:
    """Declare the output pair_scores float32 `[r, k, k]` (z-lab `CandidateSelector.select`).

    block int64 `[n, W]`; best: of r rows, the same number of first masks of each of n blocks.
    Entry `[r, i, j]` is candidate j's score if candidate i is taken one place before; at a block's
    first mask that is the anchor, whatever i. A walk over these is the host's: it may be drawn.
    """
    k, ids = selector.top_k, best.ids
    anchor = g.op("Slice", block, g.ints(0), g.ints(1), g.ints(1))
    anchor = g.op("Expand", g.op("Unsqueeze", anchor, g.ints(2)), g.ints(1, 1, k))
    n = g.op("Shape", block, start=0, end=1)
    taken = g.op("Reshape", ids, g.op("Concat", n, g.ints(-1, k), axis=0))
    taken = g.op("Concat", anchor, taken, axis=1)
    taken = g.op("Slice", taken, g.ints(0), g.ints(-1), g.ints(1))
    taken = g.op("Reshape", taken, g.ints(-1, k))
    before = _codes(g, "predecessor", taken)
    after = _codes(g, "successor", ids)
    state = linear(g, best.hidden, f"{PREFIX}hidden_projection", bias=False, exact=True)
    before = g.op("Mul", before, g.op("Unsqueeze", state, g.ints(1)))
    scores = g.op("MatMul", before, g.op("Transpose", after, perm=(0, 2, 1)))
    scores = g.op("Add", scores, g.op("Unsqueeze", best.logits, g.ints(1)))
    g.output(scores, "pair_scores", ir.DataType.FLOAT, ("r", k, k))


def _codes(g: GraphBuilder, which: str, ids: ir.Value) -> ir.Value:
    """Rows of a codebook: `[r, k]` to `[r, k, rank]`."""
    book = g.matrix(f"{PREFIX}{which}_codebook")
    return g.float32(g.op("Gather", book, ids, axis=0), book.dtype)

"""DFlash 2 additions to a drafter: convolutions around each layer's halves, and a selector."""

import onnx_ir as ir

from dflash_trt.checkpoints import Convolution, Selector
from dflash_trt.graphs.builder import GraphBuilder
from dflash_trt.graphs.layers import Best, Layer, linear
from dflash_trt.graphs.positions import Positions

PREFIX = "candidate_selector."


def convolve_before(
    g: GraphBuilder, layer: Layer, name: str, x: ir.Value, at: Positions
) -> tuple[ir.Value, ir.Value | None]:
    """Build the convolution before a half of a layer; x `[n * W, hidden_size]` is normed.

    name: "attention_conv" or "mlp_conv". Also returns the kernel for `convolve_after`, None without
    convolutions or if they change nothing (z-lab `GroupedDynamicCausalConv.prepare`).
    """
    convolution = layer.spec.convolution
    name = f"{layer.prefix}{name}"
    if convolution is None or _changes_nothing(g, convolution, name):
        return x, None
    size = convolution.kernel_size
    group = convolution.group_size
    # a kernel per channel, plus a token-dependent one per group of channels
    dynamic = linear(g, x, f"{name}.kernel_projection", bias=False)
    dynamic = at.by_sequence(g, dynamic, at.queries, 2 * size, -1, 1)
    base = g.op("Reshape", g.vector(f"{name}.base_kernel"), g.ints(2 * size, -1, group))
    before, after = g.split(g.op("Add", base, dynamic), (size, size), axis=2)
    return _convolve_part(g, convolution, x, before), after


def _changes_nothing(g: GraphBuilder, convolution: Convolution, name: str) -> bool:
    """Whether each token is multiplied by 1, as in a drafter that was trained without them."""
    if convolution.kernel_size > 1:
        return False
    base = g.weights.read(f"{name}.base_kernel")
    dynamic = g.weights.read(f"{name}.kernel_projection.weight")
    return bool((base == 1).all() and not dynamic.any())


def convolve_after(g: GraphBuilder, layer: Layer, x: ir.Value, kernel: ir.Value | None) -> ir.Value:
    """Build the convolution after a half of a layer, before the residual (z-lab `finish`)."""
    convolution = layer.spec.convolution
    if convolution is None or kernel is None:
        return x
    return _convolve_part(g, convolution, x, kernel)


def _convolve_part(
    g: GraphBuilder, convolution: Convolution, x: ir.Value, kernel: ir.Value
) -> ir.Value:
    return g.part(
        "GroupedConvolve",
        _convolve,
        x,
        kernel,
        taps=convolution.kernel_size,
        group_size=convolution.group_size,
    )


def _convolve(
    g: GraphBuilder, x: ir.Value, kernel: ir.Value, *, taps: int, group_size: int
) -> ir.Value:
    """Convolve x `[n * W, hidden_size]` with kernel `[n, W, taps, groups, group_size]`.

    Kernel entry o weighs the token o positions back; zeros precede the anchor.
    """
    last = taps - 1
    sequences = g.op("Concat", g.op("Shape", kernel, end=2), g.ints(-1), axis=0)
    shifted = [g.op("Reshape", x, sequences)]
    if last:
        padded = g.op("Pad", shifted[0], g.ints(0, last, 0, 0, 0, 0))
        for offset in range(1, last + 1):
            start = g.ints(last - offset)
            end = g.ints(-offset)
            shifted.append(g.op("Slice", padded, start, end, g.ints(1)))
    wide = g.op("Concat", *shifted, axis=2)
    grouped = g.ints(0, 0, taps, -1, group_size)
    weighed = g.op("Mul", g.op("Reshape", wide, grouped), kernel)
    out = g.op("ReduceSum", weighed, g.ints(2), keepdims=0)
    return g.op("Reshape", out, g.op("Shape", x))


def pair_scores(g: GraphBuilder, selector: Selector, block: ir.Value, best: Best) -> None:
    """Declare the output pair_scores float32 `[r, k, k]` (z-lab `CandidateSelector.select`).

    block int64 `[n, W]`; best: of r scored tokens, the first masks of n blocks, equally many each.
    Entry `[r, i, j]` is the score of candidate j after candidate i; at a block's first mask the
    anchor precedes, whatever i. The host chooses a path, because it may sample.
    """
    k = selector.top_k
    ids = best.ids
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
    """Gather rows of a codebook: `[r, k]` to `[r, k, rank]`."""
    book = g.matrix(f"{PREFIX}{which}_codebook")
    return g.float32(g.op("Gather", book, ids, axis=0), book.dtype)

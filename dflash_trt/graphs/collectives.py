"""Tensor parallelism: where ranks put their shares together (see `sharding.py`)."""

import onnx_ir as ir

from dflash_trt.graphs.builder import GraphBuilder


def add_up(g: GraphBuilder, x: ir.Value) -> ir.Value:
    """The sum of `x` over all ranks."""
    return x if g.rank.of == 1 else g.collective(x, "all_reduce", "sum")


def side_by_side(g: GraphBuilder, x: ir.Value, size: int) -> ir.Value:
    """The columns of all ranks: `[r, size / ranks]` to `[r, size]`."""
    if g.rank.of == 1:
        return x
    # ranks come one after the other along the first axis
    x = g.collective(x, "all_gather", "none")
    x = g.op("Reshape", x, g.ints(g.rank.of, -1, size // g.rank.of))
    return g.op("Reshape", g.op("Transpose", x, perm=(1, 0, 2)), g.ints(-1, size))


def own_columns(g: GraphBuilder, x: ir.Value, size: int) -> ir.Value:
    """This rank's part of the last axis of `x` `[n, S, size]`."""
    if g.rank.of == 1:
        return x
    width = size // g.rank.of
    start = g.rank.index * width
    return g.op("Slice", x, g.ints(start), g.ints(start + width), g.ints(-1))


def look_up(g: GraphBuilder, table: ir.Value, tokens: ir.Value, vocab: int) -> ir.Value:
    """Float32 rows of a table `[vocab / ranks, hidden_size]` for tokens int64 `[T]`."""
    if g.rank.of == 1:
        return g.float32(g.op("Gather", table, tokens, axis=0), table.dtype)
    size = vocab // g.rank.of
    row = g.op("Sub", tokens, g.ints(g.rank.index * size))
    ours = g.op("And", g.op("Less", g.ints(-1), row), g.op("Less", row, g.ints(size)))
    found = g.op("Gather", table, g.op("Where", ours, row, g.ints(0)), axis=0)
    found = g.float32(found, table.dtype)
    return add_up(g, g.op("Where", g.op("Unsqueeze", ours, g.ints(-1)), found, g.number(0.0)))

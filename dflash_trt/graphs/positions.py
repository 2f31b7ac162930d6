"""Where the tokens of a step are, and what each of them sees."""

from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from dflash_trt.checkpoints import LayerSpec
from dflash_trt.graphs.builder import GraphBuilder
from dflash_trt.graphs.rope import rope_tables


@dataclass(frozen=True)
class Positions:
    """What attention needs to know about where its tokens are.

    queries: int64 `[n, Q]` and keys: int64 `[n, K]`, absolute positions. write_index: int64 `[n]`,
    the cache row of the first key. mask: bool `[n, 1, Q, N]`, True where a query sees a cache row.
    visible: int64 `[1]`, N. cache_len: rows of a cache. context_len: int64 `[1]`, how many rows are
    written in front of a drafter's block; None for a target, whose cache rows are its positions.
    """

    queries: ir.Value
    keys: ir.Value
    write_index: ir.Value
    mask: ir.Value
    visible: ir.Value
    cache_len: int
    context_len: ir.Value | None = None
    _shared: dict[object, ir.Value] = field(default_factory=dict)
    _ropes: dict[str, tuple[ir.Value, ir.Value]] = field(default_factory=dict)

    def by_sequence(self, g: GraphBuilder, x: ir.Value, at: ir.Value, *sizes: int) -> ir.Value:
        """Rows `[n * S, ...]` of the tokens at positions `at` `[n, S]`, as `[n, S, *sizes]`."""
        key = (at, sizes)
        if key not in self._shared:
            self._shared[key] = g.op("Concat", g.op("Shape", at), g.ints(*sizes), axis=0)
        return g.op("Reshape", x, self._shared[key])

    def rotate(self, g: GraphBuilder, layer: LayerSpec, x: ir.Value, at: ir.Value) -> ir.Value:
        """RoPE on `[n, heads, S, head_dim]`, whose tokens are at the positions `at` `[n, S]`."""
        key = repr(layer.rope)
        if key not in self._ropes:
            name = f"rope_{len(self._ropes)}"
            self._ropes[key] = rope_tables(g, layer.rope, self.cache_len, name)
        return g.op("RotaryEmbedding", x, *self._ropes[key], at)

    def seen(self, g: GraphBuilder, layer: LayerSpec) -> ir.Value:
        """The mask of one layer, bool `[n, 1, Q, N]`: layers of one kind share it.

        A window hides what is `window` positions or more behind a query and, unless the layer is
        causal, as far ahead (z-lab `_attention_mask`). A window from the anchor is measured from
        there for the whole block (speculators `create_anchor_block_mask_mod`).
        """
        if layer.window is None and not layer.causal:
            return self.mask
        key = ("mask", layer.window, layer.window_from_anchor, layer.causal)
        if key not in self._shared:
            behind = self._behind(g, self.queries)
            mask = self.mask
            if layer.window is not None:
                start = self._behind(g, self._anchor(g)) if layer.window_from_anchor else behind
                mask = g.op("And", mask, g.op("Less", start, g.ints(layer.window)))
            if layer.causal:
                mask = g.op("And", mask, g.op("Less", g.ints(-1), behind))
            elif not (layer.window_from_anchor or layer.window is None or self.context_len is None):
                mask = g.op("And", mask, g.op("Less", g.ints(-layer.window), behind))
            self._shared[key] = mask
        return self._shared[key]

    def with_last_twice(self, g: GraphBuilder, x: ir.Value) -> ir.Value:
        """`[n, h, S, w]` to `[n, h, S + 1, w]`; what layers share is made once."""
        key = ("last twice", x)
        if key not in self._shared:
            last = g.op("Gather", x, g.ints(-1), axis=2)
            self._shared[key] = g.op("Concat", x, last, axis=2)
        return self._shared[key]

    def repeated(self, g: GraphBuilder, mask: ir.Value, times: int) -> ir.Value:
        """A mask `[n, 1, S, N]` for rows that are the queries of several heads, one by one."""
        key = ("repeated", mask, times)
        if key not in self._shared:
            self._shared[key] = g.op("Concat", *[mask] * times, axis=2)
        return self._shared[key]

    def _behind(self, g: GraphBuilder, positions: ir.Value) -> ir.Value:
        """How far each cache row lies behind `positions` `[n, S]`: int64 `[n, 1, S, N]`."""
        return g.op("Sub", g.op("Unsqueeze", positions, g.ints(1, 3)), self._key_positions(g))

    def _anchor(self, g: GraphBuilder) -> ir.Value:
        """The position of a drafter's anchor, int64 `[n, 1]`."""
        return g.op("Slice", self.queries, g.ints(0), g.ints(1), g.ints(1))

    def _key_positions(self, g: GraphBuilder) -> ir.Value:
        """Positions of the cache rows, int64 `[n or 1, 1, 1, N]`."""
        if "rows" in self._shared:
            return self._shared["rows"]
        zero, one = (g.constant(f"number_{i}", np.array(i, np.int64)) for i in (0, 1))
        rows = g.op("Range", zero, g.op("Squeeze", self.visible, g.ints(0)), one)
        rows = g.op("Unsqueeze", rows, g.ints(0))
        if self.context_len is not None:
            # features of a shorter neighbour are padded, and the block is written after the padding
            block_row = g.op("Add", self.write_index, self.context_len)
            block_row = g.op("Unsqueeze", block_row, g.ints(1))
            pad = g.op("Sub", block_row, self._anchor(g))
            context = g.op("Less", rows, block_row)
            rows = g.op("Sub", rows, g.op("Where", context, zero, pad))
        self._shared["rows"] = g.op("Unsqueeze", rows, g.ints(1, 2))
        return self._shared["rows"]

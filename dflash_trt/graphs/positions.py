"""Positions of a step's tokens, and the mask of what each attends to."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from dflash_trt.checkpoints import LayerSpec, Rope
from dflash_trt.graphs.builder import GraphBuilder

Floats = npt.NDArray[np.float32]


def rope_tables(g: GraphBuilder, rope: Rope, length: int, name: str) -> tuple[ir.Value, ir.Value]:
    """Return cosines and sines, float32 `[length, dim / 2]`."""
    angles = np.outer(np.arange(length, dtype=np.float32), inverse_frequencies(rope))
    factor = np.float32(rope.attention_factor)
    cosines = g.constant(f"{name}_cos", np.cos(angles) * factor)
    return cosines, g.constant(f"{name}_sin", np.sin(angles) * factor)


def inverse_frequencies(rope: Rope) -> Floats:
    """Return radians per position, float32 `[dim / 2]` (transformers `ROPE_INIT_FUNCTIONS`)."""
    # float32 throughout, as in transformers: float64 differs in the last digit
    exponents = np.arange(0, rope.dim, 2, dtype=np.float32) / np.float32(rope.dim)
    wavelengths = np.float32(rope.theta) ** exponents  # over 2 pi
    values = rope.parameters
    if rope.kind == "linear":
        frequencies = 1 / wavelengths / np.float32(values["factor"])
    elif rope.kind == "llama3":
        frequencies = _llama3(1 / wavelengths, values)
    elif rope.kind == "longrope":
        # long_factor is for texts beyond the original length, which the spec refuses
        frequencies = 1 / (np.array(values["short_factor"], np.float32) * wavelengths)
    elif rope.kind == "proportional":
        rotated = int(values["partial_rotary_factor"] * rope.dim // 2)
        frequencies = 1 / wavelengths / np.float32(values["factor"])
        frequencies[rotated:] = 0
    elif rope.kind == "yarn":
        frequencies = _yarn(wavelengths, rope)
    else:
        frequencies = 1 / wavelengths
    return frequencies.astype(np.float32)


def _llama3(plain: Floats, values: dict[str, Any]) -> Floats:
    """Stretch long wavelengths, keep short ones, and blend between the two bounds."""
    low = values["low_freq_factor"]
    high = values["high_freq_factor"]
    turns = values["original_max_position_embeddings"] * plain / (2 * math.pi)
    share = np.clip((turns - low) / (high - low), 0, 1)  # of the plain frequency
    frequencies: Floats = (1 - share) * plain / values["factor"] + share * plain
    return frequencies


def _yarn(wavelengths: Floats, rope: Rope) -> Floats:
    """Keep dimensions that rotate often within the original length; stretch slow ones."""
    values = rope.parameters

    def dimension_with(turns: float) -> float:
        longest = values["original_max_position_embeddings"] / (turns * 2 * math.pi)
        return rope.dim * math.log(longest) / (2 * math.log(rope.theta))

    low = dimension_with(values["beta_fast"])
    high = dimension_with(values["beta_slow"])
    if values["truncate"]:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, rope.dim - 1)
    if low == high:
        high += 0.001
    stretched = np.clip((np.arange(rope.dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    slow = stretched / (values["factor"] * wavelengths)
    frequencies: Floats = slow + (1 - stretched) / wavelengths
    return frequencies


@dataclass(frozen=True)
class Positions:
    """The positions and mask that attention needs."""

    queries: ir.Value  # int64 `[n, Q]`, absolute
    keys: ir.Value  # int64 `[n, K]`, absolute
    write_index: ir.Value  # int64 `[n]`: the KV entry of the first key
    mask: ir.Value  # bool `[n, 1, Q, N]`: whether a query sees a KV entry
    visible: ir.Value  # int64 `[1]`: N
    cache_len: int  # KV entries of a slot
    # int64 `[1]`: KV entries before a drafter's block; None for a target, where an entry's number
    # is its position
    context_len: ir.Value | None = None
    _shared: dict[object, ir.Value] = field(default_factory=dict)
    _ropes: dict[str, tuple[ir.Value, ir.Value]] = field(default_factory=dict)

    def by_sequence(self, g: GraphBuilder, x: ir.Value, at: ir.Value, *sizes: int) -> ir.Value:
        """Reshape values `[n * S, ...]` at positions `at` `[n, S]` to `[n, S, *sizes]`."""
        key = (at, sizes)
        if key not in self._shared:
            self._shared[key] = g.op("Concat", g.op("Shape", at), g.ints(*sizes), axis=0)
        return g.op("Reshape", x, self._shared[key])

    def rope_tables(self, g: GraphBuilder, layer: LayerSpec) -> tuple[ir.Value, ir.Value]:
        """Return cosines and sines of a layer's rotation; equal layers share them."""
        key = repr(layer.rope)
        if key not in self._ropes:
            name = f"rope_{len(self._ropes)}"
            self._ropes[key] = rope_tables(g, layer.rope, self.cache_len, name)
        return self._ropes[key]

    def layer_mask(self, g: GraphBuilder, layer: LayerSpec) -> ir.Value:
        """Return one layer's mask, bool `[n, 1, Q, N]`; equal layers share it.

        A window hides positions `window` or more behind a query and, unless the layer is causal, as
        far ahead (z-lab `_attention_mask`). A window from the anchor starts there for the whole
        block (speculators `create_anchor_block_mask_mod`).
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

    def _behind(self, g: GraphBuilder, positions: ir.Value) -> ir.Value:
        """Return each KV entry's distance behind `positions` `[n, S]`: int64 `[n, 1, S, N]`."""
        return g.op("Sub", g.op("Unsqueeze", positions, g.ints(1, 3)), self._key_positions(g))

    def _anchor(self, g: GraphBuilder) -> ir.Value:  # int64 `[n, 1]`
        return g.op("Slice", self.queries, g.ints(0), g.ints(1), g.ints(1))

    def _key_positions(self, g: GraphBuilder) -> ir.Value:
        """Return positions of the KV entries, int64 `[n or 1, 1, 1, N]`."""
        if "entries" in self._shared:
            return self._shared["entries"]
        zero = g.constant("number_0", np.array(0, np.int64))
        one = g.constant("number_1", np.array(1, np.int64))
        entries = g.op("Range", zero, g.op("Squeeze", self.visible, g.ints(0)), one)
        entries = g.op("Unsqueeze", entries, g.ints(0))
        if self.context_len is not None:
            # a shorter neighbor's features are padded, and the block follows the padding
            block_start = g.op("Add", self.write_index, self.context_len)
            block_start = g.op("Unsqueeze", block_start, g.ints(1))
            pad = g.op("Sub", block_start, self._anchor(g))
            context = g.op("Less", entries, block_start)
            entries = g.op("Sub", entries, g.op("Where", context, zero, pad))
        self._shared["entries"] = g.op("Unsqueeze", entries, g.ints(1, 2))
        return self._shared["entries"]

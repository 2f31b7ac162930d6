"""Rotary embeddings as tables, one for each kind that a model uses."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from dflash_trt.checkpoints import Rope
from dflash_trt.graphs.builder import GraphBuilder

Floats = npt.NDArray[np.float32]


def rope_tables(g: GraphBuilder, rope: Rope, length: int, name: str) -> tuple[ir.Value, ir.Value]:
    """Cosines and sines, float32 `[length, dim / 2]`; layers of one kind share them."""
    angles = np.outer(np.arange(length, dtype=np.float32), inverse_frequencies(rope))
    cos, sin = (
        table * np.float32(rope.attention_factor) for table in (np.cos(angles), np.sin(angles))
    )
    return g.constant(f"{name}_cos", cos), g.constant(f"{name}_sin", sin)


def inverse_frequencies(rope: Rope) -> Floats:
    """Radians per position, float32 `[dim / 2]` (transformers `ROPE_INIT_FUNCTIONS`)."""
    # float32 throughout, as transformers computes them: a float64 table differs in the last digit
    exponents = np.arange(0, rope.dim, 2, dtype=np.float32) / np.float32(rope.dim)
    wavelengths = np.float32(rope.theta) ** exponents  # over 2 pi
    values = rope.parameters
    if rope.kind == "linear":
        found = 1 / wavelengths / np.float32(values["factor"])
    elif rope.kind == "llama3":
        found = _llama3(1 / wavelengths, values)
    elif rope.kind == "longrope":
        # long_factor is for texts beyond the original length, which the spec does not allow
        found = 1 / (np.array(values["short_factor"], np.float32) * wavelengths)
    elif rope.kind == "proportional":
        rotated = int(values["partial_rotary_factor"] * rope.dim // 2)
        found = 1 / wavelengths / np.float32(values["factor"])
        found[rotated:] = 0
    elif rope.kind == "yarn":
        found = _yarn(wavelengths, rope)
    else:
        found = 1 / wavelengths
    return found.astype(np.float32)


def _llama3(plain: Floats, values: dict[str, Any]) -> Floats:
    """Long wavelengths are stretched, short ones kept, and blended between the two bounds."""
    factor, low, high = (values[f] for f in ("factor", "low_freq_factor", "high_freq_factor"))
    turns = values["original_max_position_embeddings"] * plain / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    found: Floats = (1 - kept) * plain / factor + kept * plain
    return found


def _yarn(wavelengths: Floats, rope: Rope) -> Floats:
    """Dimensions that turn often over the original length are kept, slow ones stretched."""
    values = rope.parameters

    def dimension(turns: float) -> float:
        """The dimension that makes so many turns over the original length."""
        longest = values["original_max_position_embeddings"] / (turns * 2 * math.pi)
        return rope.dim * math.log(longest) / (2 * math.log(rope.theta))

    low, high = dimension(values["beta_fast"]), dimension(values["beta_slow"])
    if values["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001
    stretched = np.clip((np.arange(rope.dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    found: Floats = stretched / (values["factor"] * wavelengths) + (1 - stretched) / wavelengths
    return found

"""Rotary embeddings as tables, one for each kind that a model uses."""

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from dflash_trt.checkpoints.spec import Rope
from dflash_trt.graphs.builder import GraphBuilder

Floats = npt.NDArray[np.float32]


def rope_tables(g: GraphBuilder, rope: Rope, length: int) -> tuple[ir.Value, ir.Value]:
    """Cosines and sines, float32 `[length, dim / 2]`; layers of one kind share them."""
    frequencies = inverse_frequencies(rope)
    angles = np.outer(np.arange(length, dtype=np.float32), frequencies)
    name = f"rope_{rope.kind}_{rope.theta:g}_{rope.dim}"
    return g.constant(f"{name}_cos", np.cos(angles)), g.constant(f"{name}_sin", np.sin(angles))


def inverse_frequencies(rope: Rope) -> Floats:
    """Radians per position, float32 `[dim / 2]` (transformers `modeling_rope_utils`)."""
    # float32 throughout, as transformers computes them: a float64 table differs in the last digit
    exponents = np.arange(0, rope.dim, 2, dtype=np.float32) / np.float32(rope.dim)
    return (1.0 / np.float32(rope.theta) ** exponents).astype(np.float32)

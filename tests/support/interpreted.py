"""Triton's interpreter, which runs kernels on a CPU where there is no GPU.

To be imported before Triton, which decides when a kernel is defined. Two things of it are not as on
a GPU: it multiplies 16 bits wrongly, so kernels widen them; and it adds up products as NumPy's BLAS
likes, by the size of a tile. A GPU adds them in order, whatever the tile: an H200 did, bit for bit,
in a prototype of these kernels (Triton 3.6, 2026-11-27). `in_order` does so.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

from dflash_trt.engines.tensorrt.library import compute_capabilities

DEVICE = "cuda" if compute_capabilities() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"


@contextmanager
def in_order() -> Iterator[None]:
    """Add up the interpreter's products by ascending place in the inner dimension."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle  # noqa: PLC0415

    def create_dot(builder: Any, x: Any, y: Any, total: Any, *_: Any) -> Any:
        added = total.data.copy()
        with np.errstate(over="ignore", invalid="ignore"):  # a GPU does not warn
            for column, row in zip(x.data.T, y.data, strict=True):
                added += column[:, None] * row
        return TensorHandle(added, total.dtype.scalar)

    with patch.object(InterpreterBuilder, "create_dot", create_dot):
        yield

"""Triton's interpreter, which runs kernels on a CPU where there is no GPU.

To be imported before Triton, which decides when a kernel is defined. 16 bits are multiplied wrongly
in it, so kernels widen them there.
"""

import os

from dflash_trt.engines.tensorrt.library import compute_capabilities

DEVICE = "cuda" if compute_capabilities() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

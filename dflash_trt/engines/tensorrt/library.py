"""TensorRT or TensorRT-RTX (`use` selects it, other modules import `trt`), and the machine for it.

`tensorrt` 11 and `tensorrt_rtx` 1.7 share one Python API, apart from features of only one. Both are
large NVIDIA packages, imported on first use.
"""

from __future__ import annotations

import ctypes
import importlib
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from dflash_trt.engines.info import EngineInfo, PlanInfo
from dflash_trt.errors import EngineError

MODULES = {"tensorrt": "tensorrt", "tensorrt_rtx": "tensorrt_rtx_bindings"}
EXTRAS = {"tensorrt": "tensorrt", "tensorrt_rtx": "rtx"}
KEPT = 20  # messages
_chosen: ModuleType | None = None

if TYPE_CHECKING:
    import tensorrt_rtx_bindings as trt
else:

    class _Library:
        def __getattr__(self, name: str) -> Any:
            return getattr(_chosen, name)

    trt = _Library()


def use(library: str) -> None:
    """Select this process's library; EngineError if it cannot be imported."""
    global _chosen
    try:
        _chosen = importlib.import_module(MODULES[library])
    except (ImportError, OSError) as error:
        raise EngineError(
            f"the library {library} is not here ({error})",
            f"Run: pip install 'dflash-trt[{EXTRAS[library]}]'",
        ) from error


def make_log() -> tuple[trt.ILogger, list[str]]:
    """Return a logger, and the list of its last warnings and errors."""
    messages: list[str] = []

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: trt.ILogger.Severity, message: str) -> None:
            if severity not in (trt.ILogger.INFO, trt.ILogger.VERBOSE):
                messages.append(message)
                del messages[:-KEPT]

    return Log(), messages


def sizes(shape: trt.Dims) -> tuple[int, ...]:
    """Return a shape as a tuple, with -1 for dynamic sizes."""
    return tuple(shape[axis] for axis in range(len(shape)))


MAJOR, MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_* of cuda.h


def compute_capabilities() -> list[str]:
    """Return the compute capability of each GPU, such as "8.9"; [] without a driver.

    Asks NVIDIA's driver directly, because nothing else need be installed.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count, device, major, minor = (ctypes.c_int() for _ in range(4))
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):  # 0 is success
        return []
    capabilities = []
    for index in range(count.value):
        cuda.cuDeviceGet(ctypes.byref(device), index)
        cuda.cuDeviceGetAttribute(ctypes.byref(major), MAJOR, device)
        cuda.cuDeviceGetAttribute(ctypes.byref(minor), MINOR, device)
        capabilities.append(f"{major.value}.{minor.value}")
    return capabilities


def check_machine(info: EngineInfo) -> PlanInfo:
    """Raise EngineError for what a plan needs and this machine lacks; return the plan's info."""
    plan = info.plan
    assert plan is not None
    planned = " or ".join(plan.compute_capabilities)
    capabilities = compute_capabilities()
    if not capabilities:
        raise EngineError(
            "this build has plans for NVIDIA GPUs, and here is no NVIDIA GPU with its driver",
            f"Run it on a machine with a GPU of compute capability {planned}",
        )
    here = capabilities[0]
    if here not in plan.compute_capabilities:
        raise EngineError(
            f"the plans are for GPUs of compute capability {planned}, and GPU 0 here has {here}",
            "Build for this one",
        )
    if find_spec("torch") is None:
        raise EngineError("plans are run with PyTorch, which is not here", "Run: pip install torch")
    use(plan.library)
    if trt.__version__ != plan.version:
        raise EngineError(
            f"the plans were built by {plan.library} {plan.version}, and here is {trt.__version__}",
            "Install that version, or build again with this one",
        )
    return plan

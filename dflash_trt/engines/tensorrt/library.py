"""Choice of TensorRT or TensorRT-RTX: `use` selects it, other modules import `trt`.

`tensorrt` 11 and `tensorrt_rtx` 1.7 share one Python API, apart from features of only one. Both are
large NVIDIA packages, imported on first use.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

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

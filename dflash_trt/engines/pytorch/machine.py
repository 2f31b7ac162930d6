"""What engine kind `pytorch` needs of a machine, found without loading anything."""

from importlib.util import find_spec
from pathlib import Path

from dflash_trt.engines.info import EngineInfo
from dflash_trt.engines.pytorch import GRAPH_FILE
from dflash_trt.engines.tensorrt.library import compute_capabilities
from dflash_trt.errors import EngineError

LEAST_CAPABILITY = (8, 0)  # older GPUs do not multiply bfloat16
INSTALL = "Run: pip install 'dflash-trt[cuda]'"


def check_machine() -> None:
    """Raise EngineError for what serving needs and this machine lacks."""
    capabilities = compute_capabilities()
    if not capabilities:
        raise EngineError(
            "this build runs on an NVIDIA GPU, and here is none with its driver",
            "Run it on a machine with one, or build with engine.kind: onnxruntime",
        )
    if not is_capable(capabilities[0]):
        raise EngineError(
            f"GPU 0 has compute capability {capabilities[0]}, and engine kind pytorch needs "
            f"{'.'.join(map(str, LEAST_CAPABILITY))} or newer",
            "Use a newer GPU",
        )
    if find_spec("torch") is None:
        raise EngineError("the engine runs on PyTorch, which is not here", INSTALL)


def is_capable(capability: str) -> bool:
    return tuple(map(int, capability.split("."))) >= LEAST_CAPABILITY


def memory_bytes(info: EngineInfo, directory: Path) -> int:
    """Return what weights and caches of an engine take of a GPU, at most."""
    weights = (directory / f"{GRAPH_FILE}.data").stat().st_size
    # most are in 16 bits in the file, as in the checkpoint
    widened = 2 * weights if info.dtype == "float32" else weights
    states = info.states.slot_bytes if info.states is not None else 0
    return widened + info.slots * (info.token_bytes * info.cache_len + states)

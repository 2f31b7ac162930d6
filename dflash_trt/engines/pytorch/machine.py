"""What engine kind `pytorch` needs of a machine, found without loading anything."""

from importlib.util import find_spec
from pathlib import Path

from dflash_trt.engines.info import EngineInfo, buffered_bytes, logits_bytes
from dflash_trt.engines.pytorch import GRAPH_FILE
from dflash_trt.engines.tensorrt.library import compute_capabilities
from dflash_trt.errors import EngineError

Capability = tuple[int, int]
LEAST: Capability = (8, 0)  # older GPUs do not multiply bfloat16
LEAST_FP8: Capability = (8, 9)  # older ones do not convert e4m3
INSTALL = "Run: pip install 'dflash-trt[cuda]'"


def check_machine(info: EngineInfo) -> None:
    """Raise EngineError for what serving needs and this machine lacks."""
    capabilities = compute_capabilities()
    if not capabilities:
        raise EngineError(
            "this build runs on an NVIDIA GPU, and here is none with its driver",
            "Run it on a machine with one, or build with engine.kind: onnxruntime",
        )
    major, minor = capabilities[0].split(".")
    if (int(major), int(minor)) < least_capability(info):
        raise EngineError(
            f"GPU 0 has compute capability {capabilities[0]}, and this build needs "
            f"{as_text(least_capability(info))} or newer",
            "Use a newer GPU" + (", or weights in 16 bits" if info.fp8 else ""),
        )
    for package in ("torch", "triton"):
        if find_spec(package) is None:
            raise EngineError(
                f"the engine runs on the package {package}, which is not here", INSTALL
            )


def least_capability(info: EngineInfo) -> Capability:
    return LEAST_FP8 if info.fp8 else LEAST


def as_text(capability: Capability) -> str:
    return ".".join(map(str, capability))


def memory_bytes(info: EngineInfo, directory: Path) -> int:
    """Return what weights, caches, buffered features and logits take of a GPU, at most."""
    weights = (directory / f"{GRAPH_FILE}.data").stat().st_size
    # most are in 16 bits in the file, as in the checkpoint
    widened = 2 * weights if info.dtype == "float32" else weights
    states = info.states.slot_bytes if info.states is not None else 0
    logits = logits_bytes(info.vocab_size, info.block_size)
    slot = info.token_bytes * info.cache_len + states + logits
    if info.role == "target":  # it buffers features, and chooses tokens from a copy of the logits
        slot += buffered_bytes(info.feature_size) + logits
    return widened + info.slots * slot

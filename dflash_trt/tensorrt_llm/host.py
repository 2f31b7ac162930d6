"""The machine that runs a bundle: its GPUs, from `nvidia-smi`."""

import importlib.util
import os
import subprocess
from contextlib import suppress
from dataclasses import dataclass

from dflash_trt.errors import EngineError
from dflash_trt.tensorrt_llm.info import BundleInfo

TIMEOUT = 60.0  # seconds; a sleeping driver needs some
FIELDS = "index,uuid,name,compute_cap,memory.total,memory.free,driver_version"
MIB = 1 << 20


@dataclass(frozen=True)
class SeenGpu:
    index: int
    name: str
    sm: int  # compute capability without the dot
    memory_bytes: int
    free_bytes: int
    driver: str


def gpus() -> list[SeenGpu]:
    """Return the GPUs that CUDA may use; none without a driver."""
    command = ["nvidia-smi", f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = []
    for line in text.splitlines():
        with suppress(ValueError):  # "[N/A]": not a supported kind of GPU
            index, uuid, name, capability, total, free, driver = map(str.strip, line.split(","))
            sizes = int(total) * MIB, int(free) * MIB
            gpu = SeenGpu(int(index), name, int(capability.replace(".", "")), *sizes, driver)
            if visible is None or {index, uuid} & {*visible.split(",")}:
                found.append(gpu)
    return found


def check_host(info: BundleInfo) -> None:
    """Raise EngineError if this machine cannot run the bundle."""
    missing = [] if importlib.util.find_spec("tensorrt_llm") else [f"TensorRT-LLM {info.version}"]
    found = len(gpus())
    if found < info.gpus:
        missing.append(f"{info.gpus} NVIDIA GPUs (it has {found})")
    if missing:
        raise EngineError(
            f"this build runs on {info.gpus * info.nodes} x {info.gpu} with TensorRT-LLM, and this "
            f"machine lacks {' and '.join(missing)}",
            "Run it there; `dflash-trt doctor` says what else a machine lacks",
        )
    if info.nodes > 1:
        raise EngineError(
            f"this build takes {info.nodes} machines, and `serve` starts one",
            "Start it with its launch/slurm.sh or launch/mpi.sh",
        )

"""Checks of shared memory, Triton, the GPUs (from `nvidia-smi`), and TensorRT-LLM."""

import os
import sys
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dflash_trt.checkpoints.findings import Check, Found, NotKnown, check
from dflash_trt.serving.server import find_binary
from dflash_trt.tensorrt_llm import (
    KIND,
    BundleInfo,
    LlmArgs,
    SeenGpu,
    gpus,
    judged_arguments,
    look_up,
    read_info,
    read_llm_args,
)

GIB = 1 << 30
LEAST_SHARED = GIB  # NCCL and Triton's Python models fail with Docker's default of 64 MiB
NO_GPU = "no GPU was found"


@dataclass(frozen=True, eq=False)
class Patient:
    """A build, and this machine as far as examined."""

    directory: Path

    @property
    def engine(self) -> Path:
        return self.directory / "engines" / KIND

    @cached_property
    def info(self) -> BundleInfo:
        return read_info(self.engine)

    @cached_property
    def args(self) -> dict[str, Any]:
        return read_llm_args(self.engine)

    @cached_property
    def all_gpus(self) -> list[SeenGpu]:
        return gpus()

    @property
    def gpus(self) -> list[SeenGpu]:
        """The GPUs that the build uses."""
        return self.all_gpus[: self.info.gpus]


@check("error")
def shared_memory(_: Patient) -> Found:
    """Check shared memory, through which NCCL and Triton's Python models pass tensors."""
    fix = "Start the container with --ipc=host or --shm-size=16g"
    try:
        status = os.statvfs("/dev/shm")
    except OSError:
        return Found(False, "there is no /dev/shm", fix)
    size = status.f_frsize * status.f_blocks
    return Found(size >= LEAST_SHARED, f"/dev/shm has {size / GIB:.2f} GiB", fix)


@check("error")
def triton(_: Patient) -> Found:
    """Check for tritonserver."""
    with tempfile.TemporaryDirectory(prefix="dflash-trt-") as runtime:
        return Found(True, str(find_binary(Path(runtime)).path))  # raises if there is none


@check("error")
def gpu_count(patient: Patient) -> Found:
    """Check the number of GPUs: each rank needs one."""
    info, found = patient.info, patient.all_gpus
    names = ", ".join(sorted({gpu.name for gpu in found})) or "none"
    what = f"{len(found)} GPUs ({names}), and the build takes {info.gpus}"
    what += f" on each of {info.nodes} machines" if info.nodes > 1 else ""
    fix = "Start a container with --gpus all, or build with a smaller engine.gpus"
    return Found(len(found) >= info.gpus, what, fix)


@check("warning")
def gpu_model(patient: Patient) -> Found:
    """Check the GPU model, which the arguments depend on."""
    if not patient.gpus:
        raise NotKnown(NO_GPU)
    info, gpu = patient.info, patient.gpus[0]
    what = f"{gpu.name} (SM{gpu.sm}); the build was made for {info.machine}: {info.gpu} "
    what += f"(SM{info.sm})"
    return Found(gpu.sm == info.sm, what, "Build it with this machine as engine.hardware")


@check("warning")
def gpu_memory(patient: Patient) -> Found:
    """Check free memory, from which the KV cache is sized at start."""
    if not patient.gpus:
        raise NotKnown(NO_GPU)
    least, wanted = min(gpu.free_bytes for gpu in patient.gpus), patient.info.memory_bytes
    what = f"{least / GIB:.0f} GiB are free on each GPU; the build was made for {wanted / GIB:.0f}"
    return Found(least >= wanted * 0.95, what, "End what `nvidia-smi` lists there")


@check("error")
def tensorrt_llm(patient: Patient) -> Found:
    """Check that TensorRT-LLM is installed, and that its `TorchLlmArgs` accepts the arguments."""
    wanted = patient.info.version
    fix = f"Run: pip install tensorrt-llm=={wanted}, or use an image that has it"
    try:
        version, refused = judged_arguments(patient.engine)
    except NotKnown as missing:
        return Found(False, f"{missing} ({sys.prefix})", fix)
    what = f"TensorRT-LLM {version}; the build is for {wanted}"
    if refused:
        what += f"; TorchLlmArgs refuses its arguments: {refused[0]}"
        return Found(False, what, "Correct engine.args, and build again")
    return Found(version == wanted, what, fix, "warning")


@check("warning")
def faults_known(patient: Patient) -> Found:
    """Check for known faults with these GPUs, arguments and packages."""
    seen = {gpu.sm for gpu in patient.gpus} or {patient.info.sm}
    return look_up(LlmArgs(patient.args), seen, patient.info.architecture)


ANY_KIND: tuple[Check[[Patient]], ...] = (shared_memory, triton)
OF_BUNDLE: tuple[Check[[Patient]], ...] = (
    gpu_count,
    gpu_model,
    gpu_memory,
    tensorrt_llm,
    faults_known,
)

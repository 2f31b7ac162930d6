"""Checks of a build's files, the GPUs (from `nvidia-smi`), and TensorRT-LLM."""

import os
import sys
import tempfile
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from dflash_trt.build import Depth, differences
from dflash_trt.checkpoints.findings import Check, Found, NotKnown, check
from dflash_trt.planning import PRESETS
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
LEAST_DRIVER = 580  # for CUDA 13 (its release notes), which TensorRT-LLM 1.4 uses
NO_GPU = "no GPU was found"


@dataclass(frozen=True, eq=False)
class Patient:
    """A build, and this machine as far as examined."""

    directory: Path
    manifest: dict[str, Any] = field(repr=False)
    depth: Depth | None  # of checking files

    @property
    def kind(self) -> str:
        return str(self.manifest["config"]["engine"]["kind"])

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
def files(patient: Patient) -> Found:
    """Check for an interrupted copy."""
    files = patient.manifest["files"]
    if found := differences(patient.directory, patient.manifest, patient.depth):
        fix = "Copy the build here again, or run `dflash-trt build` again"
        return Found(False, f"not as it was built: {found}", fix)
    size = sum(entry.get("size", 0) for entry in files.values())
    return Found(True, f"{len(files)} files as they were built, {size / 1e9:.1f} GB")


@check("error")
def shared_memory(patient: Patient) -> Found:
    """Check shared memory, through which NCCL and Triton's Python models pass tensors."""
    fix = "Start the container with --ipc=host or --shm-size=16g"
    try:
        status = os.statvfs("/dev/shm")
    except OSError:
        return Found(False, "there is no /dev/shm", fix)
    size = status.f_frsize * status.f_blocks
    return Found(size >= LEAST_SHARED, f"/dev/shm has {size / GIB:.2f} GiB", fix)


@check("error")
def triton(patient: Patient) -> Found:
    """Check for tritonserver, which splits command lines of Python models at spaces."""
    if len(str(patient.directory).split()) > 1:
        what = f"Triton runs no model under a path with a space: {patient.directory}"
        return Found(False, what, "Move the build")
    with tempfile.TemporaryDirectory(prefix="dflash-trt-") as runtime:
        return Found(True, str(find_binary(Path(runtime)).path))  # raises if there is none


@check("error")
def gpu_count(patient: Patient) -> Found:
    """Check the number of GPUs: each rank needs one."""
    info, found = patient.info, patient.all_gpus
    names = ", ".join(sorted({gpu.name for gpu in found})) or "none"
    what = f"{len(found)} GPUs ({names}), and the build takes {info.gpus}"
    what += f" on each of {info.nodes} machines" if info.nodes > 1 else ""
    if not found:
        fix = "Run it on the machine with the GPUs; start a container with --gpus all"
        return Found(False, f"{what}: `nvidia-smi` shows no GPU, or is not there", fix)
    fix = "Give it more GPUs, or build with a smaller engine.gpus"
    return Found(len(found) >= info.gpus, what, fix)


@check("warning")
def gpu_model(patient: Patient) -> Found:
    """Check the GPU model, which the arguments depend on, and the driver for CUDA 13."""
    if not patient.gpus:
        raise NotKnown(NO_GPU)
    info, gpu = patient.info, patient.gpus[0]
    what = f"{gpu.name} (SM{gpu.sm}, driver {gpu.driver}); the build was made for {info.machine}: "
    what += f"{info.gpu} (SM{info.sm})"
    if int(gpu.driver.partition(".")[0]) < LEAST_DRIVER:
        fix = f"Update the driver to {LEAST_DRIVER}, or see that the container has cuda-compat"
        return Found(False, what, fix)
    near = [name for name, machine in PRESETS.items() if machine.gpu.sm == gpu.sm]
    fix = f"Build it for this machine: engine.hardware {' or '.join(near) or 'with its figures'}"
    return Found(gpu.sm == info.sm, what, fix)


@check("warning")
def gpu_memory(patient: Patient) -> Found:
    """Check free memory, from which the KV cache is sized at start."""
    if not patient.gpus:
        raise NotKnown(NO_GPU)
    least, wanted = min(gpu.free_bytes for gpu in patient.gpus), patient.info.memory_bytes
    what = f"{least / GIB:.0f} GiB are free on each GPU; the build was made for {wanted / GIB:.0f}"
    fix = (
        "End what `nvidia-smi` lists there, or build with this machine's memory as engine.hardware"
    )
    return Found(least >= wanted * 0.95, what, fix)


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
        more = f" and {len(refused) - 1} more" if len(refused) > 1 else ""
        what += f"; TorchLlmArgs refuses its arguments: {refused[0]}{more}"
        return Found(False, what, "Correct engine.args, and build again")
    return Found(version == wanted, what, fix, "warning")


@check("warning")
def faults_known(patient: Patient) -> Found:
    """Check for known faults with these GPUs, arguments and packages."""
    seen = {gpu.sm for gpu in patient.gpus} or {patient.info.sm}
    return look_up(LlmArgs(patient.args), seen, patient.info.architecture)


ANY_KIND: tuple[Check[[Patient]], ...] = (files, shared_memory, triton)
OF_BUNDLE: tuple[Check[[Patient]], ...] = (
    gpu_count,
    gpu_model,
    gpu_memory,
    tensorrt_llm,
    faults_known,
)

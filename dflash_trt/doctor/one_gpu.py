"""Checks of a machine for a build of kind `pytorch`: its GPU, the memory of that, and PyTorch."""

import importlib
from pathlib import Path

from dflash_trt.builder import read_manifest
from dflash_trt.checkpoints import NotKnown
from dflash_trt.checks import Check, Found, check
from dflash_trt.doctor.checks import GIB, NO_GPU, Patient
from dflash_trt.engines import read_info, role_directories
from dflash_trt.engines.pytorch.machine import INSTALL, as_text, least_capability, memory_bytes

BESIDE = 2 * GIB  # of CUDA, kernels, recorded graphs and activations


@check("error")
def one_gpu(patient: Patient) -> Found:
    """Check for a GPU that multiplies bfloat16."""
    fix = "Start a container with --gpus all, or build with engine.kind: onnxruntime"
    if not patient.all_gpus:
        return Found(False, NO_GPU, fix)
    gpu = patient.all_gpus[0]
    capability = divmod(gpu.sm, 10)
    required = least_capability(read_info(patient.directory / "engines" / "target"))
    what = f"{gpu.name}, compute capability {as_text(capability)}, driver {gpu.driver}"
    return Found(capability >= required, what, f"Use one of {as_text(required)} or newer")


@check("error")
def one_gpu_memory(patient: Patient) -> Found:
    """Check free memory before weights and caches are loaded."""
    if not patient.all_gpus:
        raise NotKnown(NO_GPU)
    free = patient.all_gpus[0].free_bytes
    needed = BESIDE + needed_bytes(patient.directory)
    what = f"{free / GIB:.1f} GiB are free; weights, caches and the rest take {needed / GIB:.1f}"
    return Found(free >= needed, what, "End what `nvidia-smi` lists, or build with fewer slots")


@check("error")
def pytorch(_: Patient) -> Found:
    """Check for a PyTorch that was built for CUDA, and for Triton's language, which it brings."""
    versions = []
    for name in ("torch", "triton"):
        try:
            versions.append(f"{name} {importlib.import_module(name).__version__}")
        except ImportError as error:
            return Found(False, f"{name} cannot be imported: {error}", INSTALL)
    cuda = importlib.import_module("torch").version.cuda
    built_for = f"CUDA {cuda}" if cuda else "CPUs only"
    what = f"{' and '.join(versions)}, built for {built_for}"
    return Found(cuda is not None, what, "Install PyTorch's build for CUDA: pytorch.org says how")


def needed_bytes(directory: Path) -> int:
    """Return what weights and caches of a build take of its GPU, those of earlier texts too."""
    roles = role_directories(directory / "engines")
    earlier: int = read_manifest(directory)["config"]["serving"]["prefix_cache"] << 20
    return earlier + sum(memory_bytes(read_info(role), role) for role in roles)


OF_PYTORCH: tuple[Check[[Patient]], ...] = (one_gpu, one_gpu_memory, pytorch)

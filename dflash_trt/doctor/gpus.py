"""The GPUs, as `nvidia-smi` describes them."""

from dflash_trt.checkpoints.checks import Found, NotKnown, check
from dflash_trt.doctor.patient import GIB, Patient, more
from dflash_trt.planning import PRESETS
from dflash_trt.tensorrt_llm import not_on_nvlink

LEAST_DRIVER = 580  # of CUDA 13 (its release notes), which TensorRT-LLM 1.3 and 1.4 are built with
IN_USE = 2 << 30  # bytes of a GPU's memory that nobody but us should have
NO_GPU = "no GPU was found"


@check("warning")
def driver(patient: Patient) -> Found:
    """Without it there are no GPUs; an old one cannot run CUDA 13."""
    if not patient.all_gpus:
        return Found(
            False,
            "`nvidia-smi` shows no GPU, or is not there",
            "Run it on the machine with the GPUs; start a container with --gpus all",
            "error",
        )
    version = patient.all_gpus[0].driver
    if int(version.partition(".")[0]) >= LEAST_DRIVER:
        return Found(True, f"NVIDIA driver {version}")
    return Found(
        False,
        f"NVIDIA driver {version}, older than the {LEAST_DRIVER} of CUDA 13",
        "Update the driver, or see that the container has NVIDIA's cuda-compat package",
    )


@check("error")
def gpu_count(patient: Patient) -> Found:
    """Each rank has a GPU of its own."""
    info, found = patient.info, patient.all_gpus
    names = ", ".join(sorted({gpu.name for gpu in found})) or "none"
    what = f"{len(found)} GPUs ({names}), and the build takes {info.gpus}"
    if info.nodes > 1:
        what += f" on each of {info.nodes} machines"
    fix = "Give it more GPUs, or build with a smaller engine.gpus"
    return Found(len(found) >= info.gpus, what, fix)


@check("warning")
def gpu_model(patient: Patient) -> Found:
    """The arguments were chosen for another."""
    if not patient.gpus:
        raise NotKnown(NO_GPU)
    info, found = patient.info, {(gpu.name, gpu.sm) for gpu in patient.gpus}
    what = ", ".join(f"{name} (SM{sm})" for name, sm in sorted(found))
    if {sm for _, sm in found} == {info.sm}:
        return Found(True, f"{what}, as {info.machine} has")
    near = [name for name, machine in PRESETS.items() if {machine.gpu.sm} == {x[1] for x in found}]
    return Found(
        False,
        f"{what}; the build was made for {info.machine}: {info.gpu} (SM{info.sm})",
        f"Build it for this machine: engine.hardware {' or '.join(near) or 'with its figures'}",
    )


@check("warning")
def gpu_memory(patient: Patient) -> Found:
    """The KV cache is sized by what is free as the server starts."""
    if not patient.gpus:
        raise NotKnown(NO_GPU)
    used = {gpu.index: gpu.memory_bytes - gpu.free_bytes for gpu in patient.gpus}
    if busy := {index: size for index, size in used.items() if size > IN_USE}:
        sizes = ", ".join(f"{size / GIB:.1f} GiB of GPU {index}" for index, size in busy.items())
        return Found(False, f"{sizes} in use", "End what `nvidia-smi` lists there")
    least, wanted = min(gpu.memory_bytes for gpu in patient.gpus), patient.info.memory_bytes
    what = f"{least / GIB:.0f} GiB on each GPU"
    if least >= wanted * 0.95:
        return Found(True, f"{what}, free")
    return Found(
        False,
        f"{what}; the build was made for {wanted / GIB:.0f} GiB",
        "Build it with this machine's own memory as engine.hardware",
    )


@check("warning")
def nvlink(patient: Patient) -> Found:
    """Without it every layer waits for PCIe."""
    if len(patient.gpus) < 2:
        raise NotKnown("fewer than two GPUs to join")
    taken = {f"GPU{gpu.index}" for gpu in patient.gpus}
    apart = [pair for pair in not_on_nvlink() if taken.issuperset(pair)]
    if not apart:
        return Found(True, f"NVLink between all {len(taken)} GPUs")
    return Found(
        False,
        f"no NVLink between {apart[0][0]} and {apart[0][1]}{more(apart)}",
        "Take GPUs that `nvidia-smi topo -m` shows joined, or fewer: engine.gpus",
    )

"""Where the build lies, and what every build needs of a machine."""

import os
import shutil
import tempfile
from pathlib import Path

from dflash_trt.build import differences
from dflash_trt.checkpoints.checks import Found, check
from dflash_trt.doctor.patient import GIB, Patient
from dflash_trt.errors import ServerError
from dflash_trt.serving.server import Ports, check_ports, find_binary

LEAST_SHARED = 1 << 30  # bytes; Docker's own 64 MiB end NCCL and Triton's Python models
PORTS = Ports(8000, 8001, 8002)  # `serve`'s own


@check("error")
def files(patient: Patient) -> Found:
    """A copy that broke off, or an original of `checkpoints: link` that is gone."""
    files = patient.manifest["files"]
    if not (found := differences(patient.directory, patient.manifest, patient.depth)):
        size = sum(entry.get("size", 0) for entry in files.values())
        return Found(True, f"{len(files)} files as they were built, {size / 1e9:.1f} GB")
    return Found(
        False,
        f"not as it was built: {found}",
        "Copy the build here again, or run `dflash-trt build` again",
    )


@check("error")
def shared_memory(patient: Patient) -> Found:
    """NCCL and Triton's Python models hand over tensors through it."""
    try:
        status = os.statvfs("/dev/shm")
    except OSError:
        return Found(False, "there is no /dev/shm", "Mount one: a tmpfs of 16 GiB")
    size = status.f_frsize * status.f_blocks
    fix = "Start the container with --ipc=host or --shm-size=16g"
    return Found(size >= LEAST_SHARED, f"/dev/shm has {size / GIB:.2f} GiB", fix)


@check("error")
def triton(patient: Patient) -> Found:
    """The server itself. It splits the command lines of its Python models at spaces."""
    if len(str(patient.directory).split()) > 1:
        return Found(
            False,
            f"Triton runs no model under a path with a space: {patient.directory}",
            "Move the build",
        )
    with tempfile.TemporaryDirectory(prefix="dflash-trt-") as runtime:
        return Found(True, str(find_binary(Path(runtime)).path))  # raises where there is none


@check("warning")
def ports(patient: Patient) -> Found:
    """What `serve` takes unless told otherwise."""
    try:
        check_ports(PORTS)
    except ServerError as error:
        return Found(False, error.problem, error.fix)
    return Found(True, f"{PORTS.http}, {PORTS.grpc} and {PORTS.metrics} are free")


@check("error")
def launcher(patient: Patient) -> Found:
    """What starts a rank on each GPU of several machines."""
    if patient.info.nodes == 1:
        return Found(True, "one machine: launch/single_node.sh or `dflash-trt serve`")
    found = {name for name in ("srun", "mpirun", "trtllm-llmapi-launch") if shutil.which(name)}
    if "trtllm-llmapi-launch" in found and len(found) > 1:
        return Found(True, f"{' and '.join(sorted(found))} are here")
    return Found(
        False,
        f"the build takes {patient.info.nodes} machines; of srun, mpirun and trtllm-llmapi-launch "
        f"here: {', '.join(sorted(found)) or 'none'}",
        "Run it where Slurm or Open MPI is, and TensorRT-LLM installed",
    )

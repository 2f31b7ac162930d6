"""The machine that a bundle is run on: its GPUs, as `nvidia-smi` describes them."""

import importlib.util
import os
import re
import subprocess
from contextlib import suppress
from dataclasses import dataclass

from dflash_trt.errors import EngineError
from dflash_trt.tensorrt_llm.info import BundleInfo

TIMEOUT = 60.0  # seconds; a machine whose driver sleeps takes some
FIELDS = "index,uuid,name,compute_cap,memory.total,memory.free,driver_version"
MIB = 1 << 20


@dataclass(frozen=True)
class SeenGpu:
    index: int
    name: str
    sm: int  # compute capability without its dot
    memory_bytes: int
    free_bytes: int
    driver: str


def gpus() -> list[SeenGpu]:
    """Those that CUDA may use; none where there is no driver."""
    text = _nvidia_smi(f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = []
    for line in text.splitlines():
        with suppress(ValueError):  # "[N/A]": no GPU of the kind that this is for
            index, uuid, name, capability, total, free, driver = map(str.strip, line.split(","))
            sizes = int(total) * MIB, int(free) * MIB
            gpu = SeenGpu(int(index), name, int(capability.replace(".", "")), *sizes, driver)
            if visible is None or {index, uuid} & {*visible.split(",")}:
                found.append(gpu)
    return found


def not_on_nvlink() -> list[tuple[str, str]]:
    """Pairs of GPUs, by `nvidia-smi topo -m`, that NVLink does not join."""
    text = re.sub(r"\x1b\[\d*m", "", _nvidia_smi("topo", "-m"))  # the header is underlined
    rows = [[cell.strip() for cell in line.split("\t")] for line in text.splitlines()]
    names = [cell for cell in rows[0] if re.fullmatch(r"GPU\d+", cell)] if rows else []
    links = {row[0]: dict(zip(names, row[1:], strict=False)) for row in rows[1:] if row[0] in names}
    return [
        (one, other)
        for i, one in enumerate(names)
        for other in names[i + 1 :]
        if not links.get(one, {}).get(other, "").startswith("NV")
    ]


def check_host(info: BundleInfo) -> None:
    """EngineError in one sentence when nothing of this bundle can run here."""
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


def _nvidia_smi(*arguments: str) -> str:
    """What it prints; nothing when it is not there or fails."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=TIMEOUT, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout

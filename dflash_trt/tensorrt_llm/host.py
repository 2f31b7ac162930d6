"""The machine that runs a bundle: its GPUs, and what its TensorRT-LLM says of the arguments.

`python -m dflash_trt.tensorrt_llm.host ENGINE` lets `TorchLlmArgs` judge a bundle's arguments,
without loading a model, in a separate process: importing TensorRT-LLM is slow, may fail, and starts
CUDA. It prints one JSON object.
"""

import importlib.util
import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_trt.checkpoints import NotKnown
from dflash_trt.errors import EngineError
from dflash_trt.tensorrt_llm.bundle import BundleInfo, read_llm_args

DRIVER_TIMEOUT = 60.0  # seconds; a sleeping driver needs some
IMPORT_TIMEOUT = 300.0
FIELDS = "index,uuid,name,compute_cap,memory.total,memory.free,driver_version"
ANSWER = "tensorrt_llm"  # key of the version; TensorRT-LLM prints other lines too
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
            command, capture_output=True, text=True, timeout=DRIVER_TIMEOUT, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    seen = []
    for line in text.splitlines():
        with suppress(ValueError):  # "[N/A]": not a supported kind of GPU
            index, uuid, name, capability, total, free, driver = map(str.strip, line.split(","))
            gpu = SeenGpu(
                index=int(index),
                name=name,
                sm=int(capability.replace(".", "")),
                memory_bytes=int(total) * MIB,
                free_bytes=int(free) * MIB,
                driver=driver,
            )
            if visible is None or {index, uuid} & {*visible.split(",")}:
                seen.append(gpu)
    return seen


def check_host(info: BundleInfo, *, launched: bool = False) -> None:
    """Raise EngineError if this machine cannot run the bundle.

    launched: an MPI job over all machines started this process.
    """
    missing = []
    if importlib.util.find_spec("tensorrt_llm") is None:
        missing.append(f"TensorRT-LLM {info.version}")
    count = len(gpus())
    if count < info.gpus:
        missing.append(f"{info.gpus} NVIDIA GPUs (it has {count})")
    if missing:
        raise EngineError(
            f"this build runs on {info.gpus * info.nodes} x {info.gpu} with TensorRT-LLM, and this "
            f"machine lacks {' and '.join(missing)}",
            "Run it there; `dflash-trt doctor` says what else a machine lacks",
        )
    if info.nodes > 1 and not launched:
        raise EngineError(
            f"this build takes {info.nodes} machines, and `serve` starts the ranks of one",
            "Start it with Slurm: docs/tensorrt_llm.md, Several machines",
        )


def judged_arguments(engine: Path) -> tuple[str, list[str]]:
    """Return the installed version, and errors of its `TorchLlmArgs`; NotKnown if it fails."""
    if importlib.util.find_spec("tensorrt_llm") is None:
        raise NotKnown("TensorRT-LLM is not installed")
    command = [sys.executable, "-m", __name__, str(engine)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_TIMEOUT)
    except subprocess.TimeoutExpired:
        raise NotKnown(f"TensorRT-LLM was not imported in {IMPORT_TIMEOUT:.0f} s") from None
    answers = [line for line in done.stdout.splitlines() if line.startswith(f'{{"{ANSWER}"')]
    if not answers:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        reason = lines[-1] if lines else "no reason"
        raise NotKnown(f"TensorRT-LLM cannot be imported: {reason}")
    answer = json.loads(answers[-1])
    return answer[ANSWER], answer["refused"]


def _judge(engine: Path) -> dict[str, Any]:
    import tensorrt_llm  # noqa: PLC0415
    from tensorrt_llm.llmapi.llm_args import TorchLlmArgs  # noqa: PLC0415

    refused: list[str] = []
    try:
        TorchLlmArgs(**read_llm_args(engine))
    except (ValueError, AssertionError, TypeError) as error:  # pydantic's error is a ValueError
        listed: list[dict[str, Any]] = getattr(error, "errors", list)()
        for fault in listed:
            name = ".".join(map(str, fault["loc"]))
            refused.append(f"{name}: {fault['msg']}")
        if not refused:
            refused = [" ".join(str(error).split())]
    return {ANSWER: tensorrt_llm.__version__, "refused": refused}


if __name__ == "__main__":
    print(json.dumps(_judge(Path(sys.argv[1]))))

"""Whether TensorRT-LLM is here, and takes the build."""

import importlib.util
import subprocess
import sys

from dflash_trt.checkpoints.checks import Found, NotKnown, check
from dflash_trt.doctor.patient import Patient, last_line, more
from dflash_trt.tensorrt_llm import (
    PAGED,
    LlmArgs,
    look_up,
    refused_arguments,
)

IMPORT_TIMEOUT = 300.0  # seconds
FLASH_ATTN = "Run: pip install flash-attn; or build for a GPU with TRTLLM attention (B200, B300)"


@check("error")
def tensorrt_llm(patient: Patient) -> Found:
    """Arguments and their meaning change between versions."""
    wanted = patient.info.version
    fix = f"Run: pip install tensorrt-llm=={wanted}, or use an image that has it"
    if importlib.util.find_spec("tensorrt_llm") is None:
        return Found(False, f"TensorRT-LLM is not installed in {sys.prefix}", fix)
    code = "import tensorrt_llm; print('version', tensorrt_llm.__version__)"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=IMPORT_TIMEOUT
        )
    except subprocess.TimeoutExpired:
        return Found(False, f"importing it takes longer than {IMPORT_TIMEOUT:.0f} s", fix)
    found = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("version ")]
    if done.returncode or not found:
        return Found(False, f"TensorRT-LLM cannot be imported: {last_line(done.stderr)}", fix)
    if found[0] != wanted:
        other = f"{fix}; or build with engine.version: {found[0]}"
        return Found(False, f"TensorRT-LLM {found[0]}; the build is for {wanted}", other)
    return Found(True, f"TensorRT-LLM {wanted}")


@check("error")
def arguments_taken(patient: Patient) -> Found:
    """Its own class `TorchLlmArgs` refuses them before anything is loaded, or `LLM` would after."""
    if refused := refused_arguments(patient.engine):
        what = f"TorchLlmArgs refuses the build's arguments: {refused[0]}{more(refused)}"
        return Found(False, what, "Correct engine.args, and build again")
    return Found(True, "TorchLlmArgs takes the build's arguments")


@check("warning")
def faults_known(patient: Patient) -> Found:
    """What others met with this version, on these GPUs, with these arguments and packages."""
    info = patient.info
    return look_up(
        LlmArgs(patient.args), {gpu.sm for gpu in patient.gpus} or {info.sm}, info.architecture
    )


@check("error")
def drafter_attention(patient: Patient) -> Found:
    """The drafter's own attention kernels: their GPUs, and the package that has them."""
    drafter = patient.args.get("speculative_config") or {}
    backend = drafter.get("attention_backend", "VANILLA")
    what = f"attention_backend {backend}"
    if backend == "VANILLA" and importlib.util.find_spec("flash_attn") is None:
        return Found(False, f"{what} needs flash-attn, which is not installed", FLASH_ATTN)
    if not patient.gpus:
        raise NotKnown(f"{what}: no GPU was found")
    wrong = sorted({gpu.sm for gpu in patient.gpus} - set(PAGED))
    if backend == "TRTLLM" and wrong:
        return Found(
            False,
            f"{what} runs on SM100 and SM103, and this machine has SM{wrong[0]}",
            "Build it for this machine: engine.hardware",
        )
    return Found(True, f"{what} on SM{patient.gpus[0].sm}")

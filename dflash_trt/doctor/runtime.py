"""Whether TensorRT-LLM is here, takes the build, and decodes."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from dflash_trt.build.acceptance_probe import chat_prompts
from dflash_trt.checkpoints.checks import Found, NotKnown, check
from dflash_trt.doctor.patient import Patient, more
from dflash_trt.files import read_as
from dflash_trt.tensorrt_llm import (
    PAGED,
    BundleInfo,
    first_generation,
    look_up,
    refused_arguments,
    typed_args,
)
from dflash_trt.tensorrt_llm.first_generation import Generated

IMPORT_TIMEOUT, GENERATION_TIMEOUT = 300.0, 3600.0  # seconds
NEAR = 0.8  # of the lowest published acceptance length: texts differ, and they are few
NOTHING = 1.2  # tokens a round: the drafter does not belong to the target, or gets no features
FLASH_ATTN = "Run: pip install flash-attn; or build for a GPU with TRTLLM attention (B200, B300)"
NO_LENGTH = "See that engine.args leaves speculation on"
COLLAPSED = (
    "Check that target and drafter are the published pair (`dflash-trt inspect --deep` where it "
    "fits), and that engine.args does not turn on kv_cache_config.enable_block_reuse"
)


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
        return Found(False, f"TensorRT-LLM cannot be imported: {_last_line(done.stderr)}", fix)
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
    args = typed_args(info.version, patient.args)
    return look_up(args, {gpu.sm for gpu in patient.gpus} or {info.sm}, info.architecture)


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


@check("error")
def generation(patient: Patient) -> Found:
    """Whether it decodes at all, and whether the drafter is worth its time."""
    info, limit = patient.info, int(patient.args.get("max_seq_len") or 1024)
    if info.nodes > 1:
        raise NotKnown(f"it takes {info.nodes} machines, and this is one")
    prompts = chat_prompts(patient.directory / "tokenizer", max(1, limit - first_generation.TOKENS))
    runtime = Path(tempfile.mkdtemp(prefix="dflash-trt-doctor-"))
    result, log = runtime / "result.json", runtime / "log"
    (runtime / "prompts.json").write_text(json.dumps(prompts))
    with log.open("wb") as stream, (runtime / "prompts.json").open("rb") as given:
        process = subprocess.Popen(
            [sys.executable, "-m", first_generation.__name__, str(patient.engine), str(result)],
            stdin=given,
            stdout=stream,
            stderr=stream,
            env=os.environ | info.environment,
            start_new_session=True,  # its ranks are processes, too
        )
        try:
            with suppress(subprocess.TimeoutExpired):
                process.wait(GENERATION_TIMEOUT)
            late = process.poll() is None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if result.is_file():
        made = read_as(result, Generated)
        shutil.rmtree(runtime)
        return _judged(made, info)
    said = _last_line(log.read_text(errors="replace"))
    what = f"not done after {GENERATION_TIMEOUT:.0f} s" if late else "TensorRT-LLM ended"
    return Found(False, f"{what}: {said}", f"Read its log: {log}")


def _judged(made: Generated, info: BundleInfo) -> Found:
    what = f"{made.tokens} tokens of {made.prompts} prompts, loaded in {made.seconds:.0f} s"
    if made.acceptance_length is None:
        return Found(False, f"{what}; no round with drafts is reported", NO_LENGTH, "warning")
    what += f", {made.acceptance_length:.2f} tokens a round"
    if made.acceptance_length < NOTHING:
        return Found(False, f"{what}: hardly a draft is accepted", COLLAPSED)
    if not info.published:
        return Found(True, f"{what}; nothing is published for this pair to compare it with")
    low, high = min(info.published.values()), max(info.published.values())
    what += f"; published {low:.1f} to {high:.1f} ({info.published_by})"
    return Found(made.acceptance_length >= NEAR * low, what, COLLAPSED, "warning")


def _last_line(text: str) -> str:
    """Where a Python process says why it ended."""
    return ([line.strip() for line in text.splitlines() if line.strip()] or ["it said nothing"])[-1]

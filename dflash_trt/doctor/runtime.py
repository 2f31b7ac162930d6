"""TensorRT-LLM, and a first generation by it."""

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
from dflash_trt.doctor.patient import Patient, Seen
from dflash_trt.files import read_as
from dflash_trt.tensorrt_llm import BundleInfo, first_generation
from dflash_trt.tensorrt_llm.first_generation import Generated

PAGED = (100, 103)  # compute capabilities with the drafter's TRTLLM attention
IMPORT_TIMEOUT, GENERATION_TIMEOUT = 300.0, 3600.0  # seconds
NEAR = 0.8  # of the lowest published acceptance length: texts differ, and they are few
NOTHING = 1.2  # tokens a round: the drafter does not belong to the target, or gets no features
FLASH_ATTN = "Run: pip install flash-attn; or build for a GPU with TRTLLM attention (B200, B300)"
NO_LENGTH = "See that engine.args leaves speculation on"
COLLAPSED = (
    "Check that target and drafter are the published pair (`dflash-trt inspect --deep` where it "
    "fits), and that engine.args does not turn on kv_cache_config.enable_block_reuse"
)


def tensorrt_llm(patient: Patient) -> Seen:
    """Arguments and their meaning change between versions."""
    wanted = patient.info.version
    fix = f"Run: pip install tensorrt-llm=={wanted}, or use an image that has it"
    if importlib.util.find_spec("tensorrt_llm") is None:
        return Seen("error", f"TensorRT-LLM is not installed in {sys.prefix}", fix)
    code = "import tensorrt_llm; print('version', tensorrt_llm.__version__)"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=IMPORT_TIMEOUT
        )
    except subprocess.TimeoutExpired:
        return Seen("error", f"importing it takes longer than {IMPORT_TIMEOUT:.0f} s", fix)
    found = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("version ")]
    if done.returncode or not found:
        return Seen("error", f"TensorRT-LLM cannot be imported: {_last_line(done.stderr)}", fix)
    if found[0] != wanted:
        other = f"{fix}; or build with engine.version: {found[0]}"
        return Seen("error", f"TensorRT-LLM {found[0]}; the build is for {wanted}", other)
    return Seen("passed", f"TensorRT-LLM {wanted}")


def drafter_attention(patient: Patient) -> Seen:
    """The drafter's own attention kernels: their GPUs, and the package that has them."""
    backend = patient.args["speculative_config"].get("attention_backend", "VANILLA")
    what = f"attention_backend {backend}"
    if backend == "VANILLA" and importlib.util.find_spec("flash_attn") is None:
        return Seen("error", f"{what} needs flash-attn, which is not installed", FLASH_ATTN)
    if not patient.gpus:
        return Seen("not checked", f"{what}: no GPU was found")
    wrong = sorted({gpu.sm for gpu in patient.gpus} - set(PAGED))
    if backend == "TRTLLM" and wrong:
        return Seen(
            "error",
            f"{what} runs on SM100 and SM103, and this machine has SM{wrong[0]}",
            "Build it for this machine: engine.hardware",
        )
    return Seen("passed", f"{what} on SM{patient.gpus[0].sm}")


def generation(patient: Patient) -> Seen:
    """Whether it decodes at all, and whether the drafter is worth its time."""
    info, limit = patient.info, int(patient.args.get("max_seq_len") or 1024)
    if info.nodes > 1:
        return Seen("not checked", f"it takes {info.nodes} machines, and this is one")
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
    return Seen("error", f"{what}: {said}", f"Read its log: {log}")


def _judged(made: Generated, info: BundleInfo) -> Seen:
    what = f"{made.tokens} tokens of {made.prompts} prompts, loaded in {made.seconds:.0f} s"
    if made.acceptance_length is None:
        return Seen("warning", f"{what}; no round with drafts is reported", NO_LENGTH)
    what += f", {made.acceptance_length:.2f} tokens a round"
    if made.acceptance_length < NOTHING:
        return Seen("error", f"{what}: hardly a draft is accepted", COLLAPSED)
    if not info.published:
        return Seen("passed", f"{what}; nothing is published for this pair to compare it with")
    low, high = min(info.published.values()), max(info.published.values())
    what += f"; published {low:.1f} to {high:.1f} ({info.published_by})"
    if made.acceptance_length < NEAR * low:
        return Seen("warning", what, COLLAPSED)
    return Seen("passed", what)


def _last_line(text: str) -> str:
    """Where a Python process says why it ended."""
    return ([line.strip() for line in text.splitlines() if line.strip()] or ["it said nothing"])[-1]

"""Checks of a machine for a build: shared memory, Triton, GPUs, TensorRT-LLM and what it decodes.

The GPUs are those of `nvidia-smi`. Decoding shows the acceptance, and texts are compared with plain
decoding's.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from dflash_trt.builder.acceptance_probe import PROMPTS, chat_prompts
from dflash_trt.chat import as_chat, load_encoding
from dflash_trt.checkpoints import NotKnown
from dflash_trt.checks import Check, Found, check
from dflash_trt.files import read_as
from dflash_trt.machine import container_cpus
from dflash_trt.serving.supervisor import find_binary
from dflash_trt.tensorrt_llm import (
    KIND,
    BundleInfo,
    LlmArgs,
    SeenGpu,
    first_generation,
    gpus,
    judged_arguments,
    look_up,
    read_info,
    read_llm_args,
)
from dflash_trt.tensorrt_llm.first_generation import TOKENS, Case, Generated, Measured

GIB = 1 << 30
MIN_SHARED = GIB  # NCCL and Triton's Python models fail with Docker's default of 64 MiB
NO_GPU = "no GPU was found"
TIMEOUT = 3600.0  # seconds, for a process that decodes
MIN_LENGTH = 1.2  # tokens a round: the drafter does not belong to the target, or gets no features
PARALLEL = 64  # limit of parallel texts, which are compared with plain decoding's
MAX_LONG = 8000  # limit of the long prompt in tokens
COLLAPSED = (
    "Check that target and drafter are the published pair, and that engine.args leaves speculation "
    "on and kv_cache_config.enable_block_reuse off"
)
# names of cases
ONE = "one at a time"
LONG_PROMPT = "long prompt"


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
    return Found(size >= MIN_SHARED, f"/dev/shm has {size / GIB:.2f} GiB", fix)


@check("warning")
def cpu_binding(_: Patient) -> Found:
    """Check that no launcher has bound this process to some of the container's CPUs."""
    bound = len(os.sched_getaffinity(0))
    cpus = container_cpus()
    fix = "Start it unbound: with srun --cpu-bind=none, mpirun --bind-to none, without taskset"
    return Found(bound >= cpus, f"this process may use {bound} of {cpus} CPUs", fix)


@check("error")
def triton(_: Patient) -> Found:
    """Check for tritonserver."""
    with tempfile.TemporaryDirectory(prefix="dflash-trt-") as runtime:
        return Found(True, str(find_binary(Path(runtime)).path))  # raises if there is none


@check("error")
def gpu_count(patient: Patient) -> Found:
    """Check the number of GPUs: each rank needs one."""
    info = patient.info
    count = len(patient.all_gpus)
    names = ", ".join(sorted({gpu.name for gpu in patient.all_gpus})) or "none"
    what = f"{count} GPUs ({names}), and the build takes {info.gpus}"
    if info.nodes > 1:
        what += f" on each of {info.nodes} machines"
    fix = "Start a container with --gpus all, or build with a smaller engine.gpus"
    return Found(count >= info.gpus, what, fix)


@check("warning")
def gpu_model(patient: Patient) -> Found:
    """Check the GPU model, which the arguments depend on."""
    if not patient.gpus:
        raise NotKnown(NO_GPU)
    info = patient.info
    gpu = patient.gpus[0]
    what = f"{gpu.name} (SM{gpu.sm}); the build was made for {info.machine}: {info.gpu} "
    what += f"(SM{info.sm})"
    return Found(gpu.sm == info.sm, what, "Build it with this machine as engine.hardware")


@check("warning")
def gpu_memory(patient: Patient) -> Found:
    """Check free memory, from which the KV cache is sized at start."""
    if not patient.gpus:
        raise NotKnown(NO_GPU)
    free = min(gpu.free_bytes for gpu in patient.gpus)
    expected = patient.info.memory_bytes
    what = f"{free / GIB:.0f} GiB are free on each GPU; the build was made for {expected / GIB:.0f}"
    return Found(free >= expected * 0.95, what, "End what `nvidia-smi` lists there")


@check("error")
def tensorrt_llm(patient: Patient) -> Found:
    """Check that TensorRT-LLM is installed, and that its `TorchLlmArgs` accepts the arguments."""
    expected = patient.info.version
    fix = f"Run: pip install tensorrt-llm=={expected}, or use an image that has it"
    try:
        version, refused = judged_arguments(patient.engine)
    except NotKnown as missing:
        return Found(False, f"{missing} ({sys.prefix})", fix)
    what = f"TensorRT-LLM {version}; the build is for {expected}"
    if refused:
        what += f"; TorchLlmArgs refuses its arguments: {refused[0]}"
        return Found(False, what, "Correct engine.args, and build again")
    return Found(version == expected, what, fix, "warning")


@check("warning")
def faults_known(patient: Patient) -> Found:
    """Check for known faults with these GPUs, arguments and packages."""
    seen = {gpu.sm for gpu in patient.gpus} or {patient.info.sm}
    return look_up(LlmArgs(patient.args), seen, patient.info.architecture)


@check("error")
def generation(patient: Patient) -> Found:
    """Check that it decodes, and that the drafter pays."""
    made = _generate(patient, plain=False)
    if isinstance(made, Found):
        return made
    judged = judge_acceptance(made.cases[:1], patient.info)
    texts = made.cases[0].texts
    tokens = sum(map(len, texts))
    what = f"{tokens} tokens of {len(texts)} prompts, loaded in {made.seconds:.0f} s; {judged.what}"
    return judged._replace(what=what)


@check("error")
def acceptance(patient: Patient) -> Found:
    """Check acceptance of parallel and long prompts, where features or masks may fail."""
    return judge_acceptance(_drafted_cases(patient)[1:], patient.info)


@check("error")
def greedy_texts(patient: Patient) -> Found:
    """Check that drafts do not change texts, except between almost equally likely tokens."""
    drafted = _drafted_cases(patient)[1]
    plain = _generate(patient, plain=True)
    if isinstance(plain, Found):
        raise NotKnown(f"without the drafter {plain.what}")
    for case in (drafted, plain.cases[0]):
        if case.error:
            raise NotKnown(f"{case.name}: {case.error}")
    return compare_texts(drafted, plain.cases[0])


def judge_acceptance(cases: Sequence[Measured], info: BundleInfo) -> Found:
    lengths = {case.name: case.acceptance_length or 1.0 for case in cases}
    results = []
    for case in cases:
        length = f"{lengths[case.name]:.2f}"
        results.append(f"{case.name} {case.error or length}")
    what = f"tokens a round: {', '.join(results)}"
    low = [name for name, length in lengths.items() if length < MIN_LENGTH]
    failed = any(case.error for case in cases)
    if not failed and all(case.acceptance_length is None for case in cases):
        fix = "See that engine.args leaves speculation on"
        return Found(False, f"{what}; no round with drafts is reported", fix, "warning")
    if low == [LONG_PROMPT] and not failed:  # the text stays correct, and others are fast
        fix = "Limit serving.max_seq_len if the drafter has not learned prompts of this length"
        return Found(False, what, fix, "warning")
    if low or failed:
        return Found(False, what, COLLAPSED)
    if not info.lowest:
        return Found(True, f"{what}; nothing is published for this pair to compare it with")
    what += f"; at least {info.lowest:.2f} is believed ({info.lowest_by})"
    return Found(min(lengths.values()) >= info.lowest, what, COLLAPSED, "warning")


def compare_texts(drafted: Measured, plain: Measured) -> Found:
    """Compare texts; kernels for a row and for a block differ, which turns near-ties."""
    pairs = list(zip(drafted.texts, plain.texts, strict=True))
    equal = sum(text == plain_text for text, plain_text in pairs)
    what = f"{equal} of {len(pairs)} greedy texts are plain decoding's"
    fix = "Report it upstream with the build's arguments; without drafts texts are right"
    return Found(equal * 2 > len(pairs), what, fix)


def _drafted_cases(patient: Patient) -> list[Measured]:
    made = _generate(patient, plain=False)
    if isinstance(made, Found):
        raise NotKnown("the generation failed")
    if not patient.args.get("speculative_config"):
        raise NotKnown("the build drafts nothing")
    return made.cases


def _prompt_cases(patient: Patient) -> Iterator[Case]:
    """Yield prompts one at a time, then many at once, then a long one."""
    args = patient.args
    folder = patient.directory / "tokenizer"
    encode = load_encoding(folder)
    limit = int(args.get("max_seq_len") or 1024) - TOKENS  # of a prompt
    if not args.get("enable_chunked_prefill"):
        limit = min(limit, int(args.get("max_num_tokens") or 8192))
    limit = max(limit, 1)
    yield Case(ONE, chat_prompts(folder, limit))
    at_once = min(PARALLEL, int(args.get("max_batch_size") or 1))
    texts = [f"Request {i}. {PROMPTS[i % len(PROMPTS)]}" for i in range(1, PARALLEL + 1)]
    many = [encode(as_chat(text))[-limit:] for text in texts]
    yield Case(f"{at_once} at once", many, at_once)
    lines = [f"{i}. {PROMPTS[i % len(PROMPTS)]}" for i in range(1, MAX_LONG // 8)]
    tokens_per_line = len(encode("\n".join(lines))) / len(lines)
    count = max(int(min(limit, MAX_LONG) * 0.9 / tokens_per_line), 1)
    long = as_chat("\n".join([*lines[:count], "Answer the first of these."]))
    yield Case(LONG_PROMPT, [encode(long)[-limit:]])


@cache
def _generate(patient: Patient, *, plain: bool) -> Generated | Found:
    """Return TensorRT-LLM's results from a separate process; `Found`: why there are none."""
    info = patient.info
    if info.nodes > 1:
        raise NotKnown(f"it takes {info.nodes} machines, and this is one")
    cases = list(_prompt_cases(patient))
    if plain:
        cases = [case for case in cases if len(case.prompts) == PARALLEL]
    runtime = Path(tempfile.mkdtemp(prefix="dflash-trt-doctor-"))
    tasks = runtime / "cases.json"
    result = runtime / "result.json"
    log = runtime / "log"
    tasks.write_text(json.dumps([asdict(case) for case in cases]))
    command = [sys.executable, "-m", first_generation.__name__]
    command += [str(patient.engine), str(tasks), str(result), "plain" if plain else "drafts"]
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command,
            stdout=stream,
            stderr=stream,
            env=os.environ | info.environment,
            start_new_session=True,  # its ranks are processes too
        )
        try:
            with suppress(subprocess.TimeoutExpired):
                process.wait(TIMEOUT)
            late = process.poll() is None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if result.is_file():
        made = read_as(result, Generated)
        shutil.rmtree(runtime)
        return made
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    what = f"not done after {TIMEOUT:.0f} s" if late else "TensorRT-LLM ended"
    last = lines[-1] if lines else ""
    return Found(False, f"{what}: {last}", f"Read its log: {log}")


ANY_KIND: tuple[Check[[Patient]], ...] = (shared_memory, cpu_binding, triton)
OF_BUNDLE: tuple[Check[[Patient]], ...] = (
    gpu_count, gpu_model, gpu_memory, tensorrt_llm, faults_known
)  # fmt: skip
OF_DECODING: tuple[Check[[Patient]], ...] = (generation, acceptance, greedy_texts)

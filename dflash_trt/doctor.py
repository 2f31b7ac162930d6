"""`dflash-trt doctor`: can this machine run this build? Each check is named and says what to do.

Run it on the machine with the GPUs, before anything is served there.
"""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from dflash_trt.checkpoints.pair import Finding
from dflash_trt.checkpoints.weights import INDEX, SINGLE
from dflash_trt.deep import chat_prompts
from dflash_trt.engines.tensorrt_llm import first_generation
from dflash_trt.engines.tensorrt_llm.first_generation import Generated
from dflash_trt.engines.tensorrt_llm.host import SeenGpu, gpus, not_on_nvlink
from dflash_trt.engines.tensorrt_llm.info import KIND, BundleInfo, read_info, read_llm_args
from dflash_trt.errors import DflashError, ServerError
from dflash_trt.hardware import PRESETS
from dflash_trt.manifest import changed_files, read_manifest
from dflash_trt.serving.launch import Ports, find_binary
from dflash_trt.serving.process import check_ports
from dflash_trt.serving.security import Security

LEAST_DRIVER = 580  # of CUDA 13 (its release notes), which TensorRT-LLM 1.3 and 1.4 are built with
LEAST_SHARED = 1 << 30  # bytes; Docker's own 64 MiB end NCCL and Triton's Python models
IN_USE = 2 << 30  # bytes of a GPU's memory that nobody but us should have
PAGED = (100, 103)  # compute capabilities with the drafter's TRTLLM attention
PORTS = Ports(8000, 8001, 8002)  # `serve`'s own
IMPORT_TIMEOUT, GENERATION_TIMEOUT = 300.0, 3600.0  # seconds
NEAR = 0.8  # of the lowest published acceptance length: texts differ, and they are few
NOTHING = 1.2  # tokens a round: the drafter does not belong to the target, or gets no features
GIB = 1 << 30


class Seen(NamedTuple):
    result: Literal["passed", "warning", "error", "not checked"]
    found: str
    fix: str = ""


@dataclass(frozen=True)
class Patient:
    """A build, and this machine as far as it was looked at."""

    directory: Path
    manifest: dict[str, Any] = field(repr=False)

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
        """Those that the build takes."""
        return self.all_gpus[: self.info.gpus]


def examine(directory: Path, generate: bool | None) -> Iterator[Finding]:
    """Each check as it is made.

    generate: whether to let TensorRT-LLM decode a few prompts; None: if nothing is wrong before.
    Raises BuildError when `directory` is no build.
    """
    patient, wrong = Patient(directory.resolve(), read_manifest(directory)), False
    bundle = patient.kind == KIND
    for look in (*ANY_KIND, *(OF_BUNDLE if bundle else ())):
        finding = _finding(look, patient)
        wrong |= finding.result == "error"
        yield finding
    if bundle and generate is not False:
        asked = generate or not wrong
        skipped = Seen("not checked", "errors stand before it", "Mend them, or give --generate")
        yield _finding(generation, patient) if asked else Finding("generation", *skipped)


def files(patient: Patient) -> Seen:
    """A copy that broke off, or an original of `checkpoints: link` that is gone."""
    changed = changed_files(patient.directory, patient.manifest)
    if not changed:
        sizes = [entry["size"] for entry in patient.manifest["files"].values() if "size" in entry]
        return Seen("passed", f"{len(sizes)} files as they were built, {sum(sizes) / 1e9:.1f} GB")
    return Seen(
        "error",
        f"{changed[0]}{_more(changed)}: missing, new, or not as it was built",
        "Copy the build here again, or run `dflash-trt build` again",
    )


def shared_memory(patient: Patient) -> Seen:
    """NCCL and Triton's Python models hand over tensors through it."""
    try:
        status = os.statvfs("/dev/shm")
    except OSError:
        return Seen("error", "there is no /dev/shm", "Mount one: a tmpfs of 16 GiB")
    size = status.f_frsize * status.f_blocks
    found = f"/dev/shm has {size / GIB:.2f} GiB"
    if size < LEAST_SHARED:
        return Seen("error", found, "Start the container with --ipc=host or --shm-size=16g")
    return Seen("passed", found)


def triton(patient: Patient) -> Seen:
    """The server itself. It splits the command lines of its Python models at spaces."""
    if len(str(patient.directory).split()) > 1:
        return Seen(
            "error",
            f"Triton runs no model under a path with a space: {patient.directory}",
            "Move the build",
        )
    with tempfile.TemporaryDirectory(prefix="dflash-trt-") as runtime:
        try:
            return Seen("passed", str(find_binary(Path(runtime)).path))
        except ServerError as error:
            return Seen("error", error.problem, error.fix)


def ports(patient: Patient) -> Seen:
    """What `serve` takes unless told otherwise."""
    try:
        check_ports(PORTS, Security())
    except ServerError as error:
        return Seen("warning", error.problem, error.fix)
    return Seen("passed", f"{PORTS.http}, {PORTS.grpc} and {PORTS.metrics} are free")


def hub_target(patient: Patient) -> Seen:
    """A target that was left on the Hub is fetched when the server starts, by every rank."""
    if not (target := patient.info.target):
        return Seen("passed", "the target lies in the build")
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415

    def cached(name: str) -> Path | None:
        found = try_to_load_from_cache(target["id"], name, revision=target["revision"])
        return Path(found) if isinstance(found, str) else None

    index = cached(INDEX)
    shards = set(json.loads(index.read_text())["weight_map"].values()) if index else {SINGLE}
    what = f"{target['id']} at {target['revision']}"
    if all(cached(shard) for shard in shards):
        return Seen("passed", f"{what} is in the Hub's cache")
    return Seen(
        "warning",
        f"{what} is not whole in the Hub's cache: the first start downloads it",
        f"Run: hf download {target['id']} --revision {target['revision']}",
    )


def driver(patient: Patient) -> Seen:
    """Without it there are no GPUs; an old one cannot run CUDA 13."""
    if not patient.all_gpus:
        return Seen(
            "error",
            "`nvidia-smi` shows no GPU, or is not there",
            "Run it on the machine with the GPUs; start a container with --gpus all",
        )
    version = patient.all_gpus[0].driver
    if int(version.partition(".")[0]) < LEAST_DRIVER:
        return Seen(
            "warning",
            f"NVIDIA driver {version}, older than the {LEAST_DRIVER} of CUDA 13",
            "Update the driver, or see that the container has NVIDIA's cuda-compat package",
        )
    return Seen("passed", f"NVIDIA driver {version}")


def gpu_count(patient: Patient) -> Seen:
    """Each rank has a GPU of its own."""
    info, found = patient.info, patient.all_gpus
    names = ", ".join(sorted({gpu.name for gpu in found})) or "none"
    what = f"{len(found)} GPUs ({names}), and the build takes {info.gpus}"
    if info.nodes > 1:
        what += f" on each of {info.nodes} machines"
    if len(found) < info.gpus:
        return Seen("error", what, "Give it more GPUs, or build with a smaller engine.gpus")
    return Seen("passed", what)


def gpu_model(patient: Patient) -> Seen:
    """The arguments were chosen for another."""
    if not patient.gpus:
        return Seen("not checked", "no GPU was found")
    info, found = patient.info, {(gpu.name, gpu.sm) for gpu in patient.gpus}
    what = ", ".join(f"{name} (SM{sm})" for name, sm in sorted(found))
    if {sm for _, sm in found} == {info.sm}:
        return Seen("passed", f"{what}, as {info.machine} has")
    near = [name for name, machine in PRESETS.items() if {machine.gpu.sm} == {x[1] for x in found}]
    return Seen(
        "warning",
        f"{what}; the build was made for {info.machine}: {info.gpu} (SM{info.sm})",
        f"Build it for this machine: engine.hardware {' or '.join(near) or 'with its figures'}",
    )


def gpu_memory(patient: Patient) -> Seen:
    """The KV cache is sized by what is free as the server starts."""
    if not patient.gpus:
        return Seen("not checked", "no GPU was found")
    least = min(gpu.memory_bytes for gpu in patient.gpus)
    used = {gpu.index: gpu.memory_bytes - gpu.free_bytes for gpu in patient.gpus}
    busy = {index: size for index, size in used.items() if size > IN_USE}
    if busy:
        sizes = ", ".join(f"{size / GIB:.1f} GiB of GPU {index}" for index, size in busy.items())
        return Seen("warning", f"{sizes} in use", "End what `nvidia-smi` lists there")
    what, wanted = f"{least / GIB:.0f} GiB on each GPU", patient.info.memory_bytes
    if least < wanted * 0.95:
        return Seen(
            "warning",
            f"{what}; the build was made for {wanted / GIB:.0f} GiB",
            "Build it with this machine's own memory as engine.hardware",
        )
    return Seen("passed", f"{what}, free")


def nvlink(patient: Patient) -> Seen:
    """Without it every layer waits for PCIe."""
    if len(patient.gpus) < 2:
        return Seen("not checked", "fewer than two GPUs to join")
    taken = {f"GPU{gpu.index}" for gpu in patient.gpus}
    apart = [pair for pair in not_on_nvlink() if taken.issuperset(pair)]
    if not apart:
        return Seen("passed", f"NVLink between all {len(taken)} GPUs")
    return Seen(
        "warning",
        f"no NVLink between {apart[0][0]} and {apart[0][1]}" + _more(apart),
        "Take GPUs that `nvidia-smi topo -m` shows joined, or fewer: engine.gpus",
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


def launcher(patient: Patient) -> Seen:
    """What starts a rank on each GPU of several machines."""
    if patient.info.nodes == 1:
        return Seen("passed", "one machine: launch/single_node.sh or `dflash-trt serve`")
    found = {name for name in ("srun", "mpirun", "trtllm-llmapi-launch") if shutil.which(name)}
    if "trtllm-llmapi-launch" in found and len(found) > 1:
        return Seen("passed", f"{' and '.join(sorted(found))} are here")
    return Seen(
        "error",
        f"the build takes {patient.info.nodes} machines; of srun, mpirun and trtllm-llmapi-launch "
        f"here: {', '.join(sorted(found)) or 'none'}",
        "Run it where Slurm or Open MPI is, and TensorRT-LLM installed",
    )


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
        made = Generated(**json.loads(result.read_text()))
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


FLASH_ATTN = "Run: pip install flash-attn; or build for a GPU with TRTLLM attention (B200, B300)"
NO_LENGTH = "See that engine.args leaves enable_iter_perf_stats on, and speculation"
COLLAPSED = (
    "Check that target and drafter are the published pair (`dflash-trt inspect --deep` where it "
    "fits), and that engine.args does not turn on kv_cache_config.enable_block_reuse"
)
Look = Callable[[Patient], Seen]
ANY_KIND: tuple[Look, ...] = (files, shared_memory, triton, ports)
OF_BUNDLE: tuple[Look, ...] = (
    driver,
    gpu_count,
    gpu_model,
    gpu_memory,
    nvlink,
    tensorrt_llm,
    drafter_attention,
    hub_target,
    launcher,
)


def _finding(look: Look, patient: Patient) -> Finding:
    name = look.__name__.replace("_", "-")
    try:
        return Finding(name, *look(patient))
    except DflashError as error:
        return Finding(name, "error", error.problem, error.fix)


def _more(found: list[Any]) -> str:
    return f" and {len(found) - 1} more" if len(found) > 1 else ""


def _last_line(text: str) -> str:
    """Where a Python process says why it ended."""
    return ([line.strip() for line in text.splitlines() if line.strip()] or ["it said nothing"])[-1]

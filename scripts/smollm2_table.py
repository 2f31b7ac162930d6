"""Prints SmolLM2's cells of docs/benchmarks.md, of what `bench engine --output` has measured.

    python scripts/smollm2_table.py RUN.json

A method's tokens/s of plain decoding's beside it, the median of all passes: while all streams
decode (`full_rates`), and in brackets from the first prompt to the last text's end, when a method
that has its texts sooner decodes the rest with fewer streams.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from dflash_trt.bench import (
    Cell,
    Page,
    Run,
    Table,
    full_rates,
    measured_on,
    plain_of,
    rates,
    read_run,
    to_markdown,
)

Rates = Callable[[Cell], Sequence[float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    run = read_run(parser.parse_args().run)
    assert isinstance(run, Run)
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for cell in run.cells:
        plain = plain_of(run, cell)
        assert plain is not None
        at = (cell.task, f"{cell.batch}", f"{cell.temperature:g}")
        row = rows.setdefault(at, dict(zip(("prompts", "streams", "T"), at, strict=True)))
        if cell is plain:
            row["plain, tokens/s"] = f"{median(full_rates(cell)):.0f}"
            continue
        sustained, whole = (ratio(each, cell, plain) for each in (full_rates, rates))
        drafts = f", {cell.draft_tokens} drafts" * (cell.method == "dflash")
        row[f"{cell.method}{drafts}"] = f"{sustained:.2f} ({whole:.2f})"
        assert cell.identical is not None
        assert cell.identical[0] == cell.identical[1]  # texts are plain decoding's
    about = measured_on(run.machine, run.versions)
    print(to_markdown(Page("", about, [], [Table("Cells", "", [*rows.values()])])))


def ratio(speed: Rates, cell: Cell, plain: Cell) -> float:
    return median(a / b for a, b in zip(speed(cell), speed(plain), strict=True))


if __name__ == "__main__":
    main()

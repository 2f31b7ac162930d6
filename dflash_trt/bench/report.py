"""Runs of `bench engine` as Markdown."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from dflash_trt.bench.engine import ADAPTIVE
from dflash_trt.bench.results import Cell, Run, phases, plain_of, rates, speedups, verified


@dataclass(frozen=True)
class Table:
    """Table with cells by column; `note` explains them and units. Not shown if empty."""

    title: str
    note: str
    rows: Sequence[Mapping[str, str]]

    def __str__(self) -> str:
        head = list(dict.fromkeys(name for row in self.rows for name in row))
        rule = ["---", *["---:"] * (len(head) - 1)]
        lines = [[row.get(name, "") for name in head] for row in self.rows]
        rows = ["| " + " | ".join(cells) + " |" for cells in (head, rule, *lines)]
        return "\n".join([f"## {self.title}", "", self.note, "", *rows, ""])


def engine_report(run: Run) -> str:
    """Return the report: speed, time of a round by phase, acceptance, and the machine."""
    options = {name.replace("_", " "): value for name, value in run.options.items()}
    about = [
        f"# {run.name}: engine benchmark",
        f"Target: {run.target}. Drafter: {run.drafter}.",
        *measured_on(run.machine, run.versions),
        f"Options: {', '.join(f'{name} {value}' for name, value in options.items())}. "
        f"Peak memory {run.peak_memory / 2**20:.0f} MiB.",
        "Median of the passes, in brackets the smallest and the largest. A speedup compares each "
        "pass with the pass of plain decoding beside it.",
        *["Interrupted: what was measured until then."] * (not run.complete),
    ]
    return "\n\n".join([*about, *(str(table) for table in _tables(run) if table.rows)])


def measured_on(machine: Mapping[str, Any], versions: Mapping[str, str]) -> list[str]:
    """Describe machine and versions."""
    load = ", ".join(f"{value:.2f}" for value in machine["load_average"])
    return [
        f"Machine: {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['memory'] / 2**30:.0f} GiB, {machine['system']}; load {load}.",
        "Versions: " + ", ".join(f"{name} {value}" for name, value in versions.items()) + ".",
    ]


def _tables(run: Run) -> Iterator[Table]:
    rows = []
    for cell in run.cells:
        plain = plain_of(run, cell) if cell.method != "plain" else None
        same = cell.identical if plain is not None else None
        rows.append(
            {
                "setting": str(cell),
                "tokens/s": _spread(rates(cell), ".0f"),
                "speedup": _spread(speedups(cell, plain), ".2f") if plain is not None else "",
                "tokens": str(sum(sample.tokens for sample in cell.samples)),
                "rounds": str(sum(sample.rounds for sample in cell.samples)),
                "tau": f"{cell.tau:.2f}" if cell.method != "plain" else "",
                "same texts": "{} of {}".format(*same) if same else "",
            }
        )
    note = (
        "Tokens per second of the whole batch, prompts included; tokens and rounds of all passes. "
        "The first token of a text comes from no round. Same texts: equal to plain decoding's."
    )
    yield Table("Speed", note, rows)
    times = [(cell, phases(cell)) for cell in run.cells]
    rows = [
        _row(cell, {**parts, "whole round": sum(parts.values())}, ".2f") for cell, parts in times
    ]
    yield Table("Where a round's time goes", "Milliseconds of a step of the whole batch.", rows)
    adaptive = [cell for cell in run.cells if cell.method in ADAPTIVE]
    note = "Share of rounds of single sequences that verified nothing, or what kind of drafts."
    yield Table("What rounds verified", note, [_row(x, verified(x), ".0%") for x in adaptive])
    kept = [
        (cell, {f"draft {i}": share for i, share in enumerate(cell.kept, 1)})
        for cell in run.cells
        if cell.kept
    ]
    note = "Share of rounds that kept this draft and all before it; tau is 1 and their sum."
    yield Table("Acceptance by position", note, [_row(*each, ".2f") for each in kept])


def _row(cell: Cell, values: Mapping[str, float], form: str) -> dict[str, str]:
    return {"setting": str(cell), **{name: f"{x:{form}}" for name, x in values.items()}}


def _spread(values: Sequence[float], form: str) -> str:
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"

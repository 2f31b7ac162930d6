"""Runs of `bench engine` as Markdown."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from dflash_trt.bench.results import Run, speedups, step_milliseconds, tokens_per_second


@dataclass(frozen=True)
class Table:
    title: str
    note: str  # explains columns and units
    rows: Sequence[Mapping[str, str]]  # cells by column

    def __str__(self) -> str:
        columns = list(dict.fromkeys(name for row in self.rows for name in row))
        rule = ["---", *["---:"] * (len(columns) - 1)]
        lines = [f"## {self.title}", "", self.note, "", _line(columns), _line(rule)]
        for row in self.rows:
            lines.append(_line([row.get(name, "") for name in columns]))
        return "\n".join([*lines, ""])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def engine_report(run: Run) -> str:
    machine = run.machine
    load = ", ".join(f"{value:.2f}" for value in machine["load_average"])
    about = [
        f"# {run.name}: engine benchmark",
        f"Machine: {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['memory'] / 2**30:.0f} GiB, {machine['system']}; load {load}.",
        f"Versions: {', '.join(f'{name} {value}' for name, value in run.versions.items())}.",
        f"Options: {', '.join(f'{name} {value}' for name, value in run.options.items())}.",
        "Median of the passes, in brackets the smallest and the largest. A speedup compares each "
        "pass with the pass of plain decoding beside it.",
        str(_speed_table(run)),
    ]
    return "\n\n".join(about)


def _speed_table(run: Run) -> Table:
    rows = [
        {
            "setting": str(cell),
            "tokens/s": _spread(tokens_per_second(cell), ".0f"),
            "speedup": _spread(speedups(run, cell), ".2f"),
            "tau": f"{cell.tau:.2f}",
            "round, ms": " + ".join(f"{time:.2f}" for time in step_milliseconds(cell)),
            "same texts": "{} of {}".format(*cell.identical),
        }
        for cell in run.cells
    ]
    note = (
        "Tokens per second of the whole batch, prompts included. Round: median milliseconds of "
        "target, drafter, and scheduler. Same texts: equal to plain decoding's."
    )
    return Table("Speed", note, rows)


def _spread(values: Sequence[float], form: str) -> str:
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"

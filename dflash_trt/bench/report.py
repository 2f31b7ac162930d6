"""A run as one self-contained HTML file and as Markdown, for whoever decides."""

import json
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from dflash_trt.bench.charts import Bars, Curve, bars, curves
from dflash_trt.bench.compare import describe
from dflash_trt.bench.results import Cell, Run
from dflash_trt.bench.stats import phases, plain_of, rates, speedups, spread
from dflash_trt.errors import RequestError

Table = tuple[list[str], list[list[str]]]
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #111827; max-width: 68rem; margin: 2rem auto;
  padding: 0 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 1rem 0; }
th, td { border-bottom: 1px solid #e5e7eb; padding: .3rem .7rem; text-align: right; }
th:first-child, td:first-child { text-align: left; }
td { white-space: nowrap; }
svg { max-width: 100%; height: auto; margin: 1rem 0; border: 1px solid #e5e7eb; }
.note { color: #4b5563; }
"""


def write_report(directory: Path, run: Run) -> None:
    """Write `report.html` and `report.md`; RequestError when that cannot be done."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "report.html").write_text(to_html(run), encoding="utf-8")
        (directory / "report.md").write_text(to_markdown(run), encoding="utf-8")
    except OSError as error:
        raise RequestError(
            f"cannot write the report to {directory}: {error.strerror}", "Give another --report"
        ) from error


def to_markdown(run: Run) -> str:
    """Tables and what they were measured on."""
    lines = [f"# {run.name}: benchmark", "", *_about(run), ""]
    for title, note, (head, rows) in _tables(run):
        lines += [f"## {title}", "", note, ""]
        lines += [_row(head), _row(["---", *["---:"] * (len(head) - 1)]), *map(_row, rows), ""]
    return "\n".join(lines)


def to_html(run: Run) -> str:
    """The same with charts, in one file that needs no network."""
    body = [f"<h1>{escape(run.name)}: benchmark</h1>"]
    body += [f'<p class="note">{escape(line)}</p>' for line in _about(run) if line]
    body += list(_charts(run))
    for title, note, (head, rows) in _tables(run):
        body.append(f"<h2>{escape(title)}</h2><p class='note'>{escape(note)}</p><table><tr>")
        body += [f"<th>{escape(cell)}</th>" for cell in head]
        body.append("</tr>")
        for row in rows:
            body.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>")
        body.append("</table>")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(run.name)}'
        f"</title><style>{STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def _about(run: Run) -> list[str]:
    machine = run.machine
    load = ", ".join(f"{value:.2f}" for value in machine["load_average"])
    lines = [
        f"Target: {run.target}. Drafter: {run.drafter}.",
        f"Machine: {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['memory'] / 2**30:.0f} GiB, {machine['system']}; load {load}.",
        "Versions: " + ", ".join(f"{name} {value}" for name, value in run.versions.items()) + ".",
        f"Options: {json.dumps(run.options)}. Peak memory {run.peak_memory / 2**20:.0f} MiB.",
        "Middle value of the passes, in brackets the smallest and the largest. A speedup compares "
        "each pass with the pass of plain decoding beside it.",
    ]
    if not run.complete:
        lines.append("Interrupted: what was measured until then.")
    return [part for line in lines for part in (line, "")]


def _tables(run: Run) -> Iterator[tuple[str, str, Table]]:
    head = ["setting", "tokens/s", "speedup", "tau", "texts equal to plain decoding"]
    rows = []
    for cell in run.cells:
        plain = plain_of(run, cell)
        compared = plain is not None and cell.method != "plain"
        rows.append(
            [
                describe(cell),
                _spread(rates(cell), ".0f"),
                _spread(speedups(cell, plain), ".2f") if compared and plain else "",
                f"{cell.tau:.2f}" if cell.method != "plain" else "",
                "{} of {}".format(*cell.identical) if cell.identical and compared else "",
            ]
        )
    yield "Speed", "Tokens per second of the whole batch, prompts included.", (head, rows)
    head = ["setting", "verify", "draft", "sampling", "scheduler", "whole round"]
    rows = []
    for cell in run.cells:
        parts = phases(cell)
        times = [f"{value:.2f}" for value in (*parts.values(), sum(parts.values()))]
        rows.append([describe(cell), *times])
    yield "Where a round's time goes", "Milliseconds of a step of the whole batch.", (head, rows)
    drafting = [cell for cell in run.cells if cell.kept]
    if drafting:
        longest = max(len(cell.kept) for cell in drafting)
        head = ["setting", *(f"draft {i + 1}" for i in range(longest))]
        rows = [
            [describe(cell), *(f"{share:.2f}" for share in cell.kept)]
            + [""] * (longest - len(cell.kept))
            for cell in drafting
        ]
        note = "Share of rounds that kept this draft and all before it; tau is 1 and their sum."
        yield "Acceptance by position", note, (head, rows)


def _charts(run: Run) -> Iterator[str]:
    groups = _group_names(run)
    compared = [
        (cell, plain)
        for cell in run.cells
        if cell.method != "plain" and (plain := plain_of(run, cell)) is not None
    ]
    if compared:
        ways = list(dict.fromkeys(_way(cell) for cell, _ in compared))
        found = {(_way(c), c.group): _range(speedups(c, plain)) for c, plain in compared}
        data = [Bars(way, [found.get((way, group)) for group in groups]) for way in ways]
        title = "Speedup over plain decoding"
        yield bars(title, "times plain decoding", list(groups.values()), data, line=1.0)
    lines: dict[str, list[Cell]] = {}
    for cell in run.cells:
        rest = ", ".join(_parts(run, cell, ("task", "context", "threads", "temperature")))
        lines.setdefault(f"{_way(cell)} {rest}".strip(), []).append(cell)
    if any(len(cells) > 1 for cells in lines.values()):
        pareto = []
        for name, cells in lines.items():
            ordered = sorted(cells, key=lambda cell: cell.batch)
            totals = [spread(rates(cell)).middle for cell in ordered]
            points = [(total / c.batch, total) for total, c in zip(totals, ordered, strict=True)]
            pareto.append(Curve(name, points, [str(cell.batch) for cell in ordered]))
        title = "Speed of one sequence against all of them (numbers: batch)"
        yield curves(title, "tokens/s per sequence", "tokens/s in all", pareto)
    accepted = [
        Curve(f"{_way(cell)} {groups[cell.group]}", list(enumerate(cell.kept, 1)))
        for cell in run.cells
        if cell.kept
    ]
    if accepted:
        yield curves("Acceptance by position", "draft", "share of rounds that kept it", accepted)


def _way(cell: Cell) -> str:
    drafts = "auto" if cell.draft_tokens is None else cell.draft_tokens
    return cell.method if cell.method == "plain" else f"{cell.method} ({drafts})"


def _group_names(run: Run) -> dict[tuple[object, ...], str]:
    """What tells the groups of this run apart, in words."""
    names = ("task", "batch", "context", "threads", "temperature")
    return {cell.group: ", ".join(_parts(run, cell, names)) or cell.task for cell in run.cells}


def _parts(run: Run, cell: Cell, names: Sequence[str]) -> list[str]:
    """Those of a cell's values that are not the same in all cells."""
    varying = [name for name in names if len({getattr(c, name) for c in run.cells}) > 1]
    values = {name: getattr(cell, name) for name in varying}
    return [str(v) if name == "task" else f"{name} {v}" for name, v in values.items()]


def _range(values: Sequence[float]) -> tuple[float, float, float]:
    found = spread(values)
    return found.middle, found.low, found.high


def _spread(values: Sequence[float], form: str) -> str:
    found = spread(values)
    return f"{found.middle:{form}} ({found.low:{form}} to {found.high:{form}})"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

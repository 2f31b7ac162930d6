"""A run of `bench engine` as a page, for whoever decides."""

from collections.abc import Iterator, Sequence

from dflash_trt.bench.compare import describe
from dflash_trt.bench.page import Page, Table
from dflash_trt.bench.results import Cell, Run, in_words, measured_on
from dflash_trt.bench.stats import phases, plain_of, rates, speedups, spread, verified
from dflash_trt.charts import Bars, Curve, bars, curves
from dflash_trt.decoding.speculation.offers import VERIFIED
from dflash_trt.roofline import published_rows


def engine_page(run: Run) -> Page:
    """Speed, where the time goes and acceptance, with what they were measured on."""
    about = [
        f"Target: {run.target}. Drafter: {run.drafter}.",
        *measured_on(run.machine, run.versions),
        f"Options: {in_words(run.options)}. Peak memory {run.peak_memory / 2**20:.0f} MiB.",
        "Middle value of the passes, in brackets the smallest and the largest. A speedup compares "
        "each pass with the pass of plain decoding beside it.",
    ]
    if not run.complete:
        about.append("Interrupted: what was measured until then.")
    title = f"{run.name}: engine benchmark"
    tables = [
        *_tables(run),
        *published_tables(run.hub.get("target", ""), run.hub.get("drafter", "")),
    ]
    return Page(title, about, list(_charts(run)), tables)


def published_tables(target: str, drafter: str) -> list[Table]:
    """What others measured of a pair, by the ids on the Hub; no table if nothing is known."""
    found = published_rows(target, drafter)
    if not found:
        return []
    head = ["source", "hardware", "task", "drafts", "sequences", "speedup", "tau"]
    lines = [
        [
            row.source,
            row.hardware,
            row.task,
            "" if row.draft_tokens is None else str(row.draft_tokens),
            row.sequences,
            row.speedup,
            "" if row.tau is None else f"{row.tau:.2f}",
        ]
        for row in found
    ]
    note = (
        f"Measured by others, on their hardware: {drafter} for {target}. Speedups are over plain "
        "decoding there; what is empty was not published."
    )
    return [Table("Published for this pair", note, head, lines)]


def _tables(run: Run) -> Iterator[Table]:
    head = ["setting", "tokens/s", "speedup", "tokens", "rounds", "tau"]
    head += ["same texts"]
    rows = []
    for cell in run.cells:
        plain = plain_of(run, cell)
        compared = plain is not None and cell.method != "plain"
        rows.append(
            [
                describe(cell),
                _spread(rates(cell), ".0f"),
                _spread(speedups(cell, plain), ".2f") if compared and plain else "",
                str(sum(sample.tokens for sample in cell.samples)),
                str(sum(sample.rounds for sample in cell.samples)),
                f"{cell.tau:.2f}" if cell.method != "plain" else "",
                "{} of {}".format(*cell.identical) if cell.identical and compared else "",
            ]
        )
    note = (
        "Tokens per second of the whole batch, prompts included; tokens and rounds of all passes. "
        "The first token of a text comes from no round. Same texts: equal to plain decoding's."
    )
    yield Table("Speed", note, head, rows)
    head = ["setting", "verify", "draft", "sampling", "scheduler", "whole round"]
    rows = []
    for cell in run.cells:
        parts = phases(cell)
        times = [f"{value:.2f}" for value in (*parts.values(), sum(parts.values()))]
        rows.append([describe(cell), *times])
    note = "Milliseconds of a step of the whole batch."
    yield Table("Where a round's time goes", note, head, rows)
    chosen = [(cell, verified(cell)) for cell in run.cells if cell.method == "adaptive"]
    if chosen:
        head = ["setting", *VERIFIED]
        rows = [
            [describe(cell), *(f"{shares[name]:.0%}" for name in VERIFIED)]
            for cell, shares in chosen
        ]
        note = "Share of rounds of single sequences that verified nothing, or what kind of drafts."
        yield Table("What rounds verified", note, head, rows)
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
        yield Table("Acceptance by position", note, head, rows)


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
        for name, cells in sorted(lines.items(), key=lambda each: each[0].startswith("plain")):
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
    return [
        str(value) if name == "task" else f"{name} {'as-is' if value is None else f'{value:g}'}"
        for name, value in values.items()
    ]


def _range(values: Sequence[float]) -> tuple[float, float, float]:
    found = spread(values)
    return found.middle, found.low, found.high


def _spread(values: Sequence[float], form: str) -> str:
    found = spread(values)
    return f"{found.middle:{form}} ({found.low:{form}} to {found.high:{form}})"

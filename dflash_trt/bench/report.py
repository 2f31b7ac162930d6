"""Runs of `bench engine` and `bench serve` as pages."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dflash_trt.bench.engine import ADAPTIVE
from dflash_trt.bench.page import Page, Table
from dflash_trt.bench.results import GROUP, PERCENTILES, Cell, Run, ServerRun
from dflash_trt.bench.stats import describe, phases, plain_of, rates, speedups, spread, verified
from dflash_trt.charts import Bars, Curve, bars, curves
from dflash_trt.roofline import published_rows

INTERRUPTED = "Interrupted: what was measured until then."


def engine_page(run: Run) -> Page:
    """The page of a run: speed, where a round's time goes, acceptance, and the machine."""
    about = [
        f"Target: {run.target}. Drafter: {run.drafter}.",
        *measured_on(run.machine, run.versions),
        f"Options: {in_words(run.options)}. Peak memory {run.peak_memory / 2**20:.0f} MiB.",
        "Median of the passes, in brackets the smallest and the largest. A speedup compares each "
        "pass with the pass of plain decoding beside it.",
        *[INTERRUPTED] * (not run.complete),
    ]
    published = published_tables(run.hub.get("target", ""), run.hub.get("drafter", ""))
    title = f"{run.name}: engine benchmark"
    return Page(title, about, list(_engine_charts(run)), [*_engine_tables(run), *published])


def published_tables(target: str, drafter: str) -> list[Table]:
    """A table of what others measured of a pair, by its ids on the Hub; [] if nothing is known."""
    rows = published_rows(target, drafter)
    note = (
        f"Measured by others, on their hardware: {drafter} for {target}. Speedups are over plain "
        "decoding there; what is empty was not published."
    )
    return [Table("Published for this pair", note, rows)] if rows else []


def _engine_tables(run: Run) -> Iterator[Table]:
    rows = []
    for cell in run.cells:
        plain = plain_of(run, cell) if cell.method != "plain" else None
        same = cell.identical if plain is not None else None
        rows.append(
            {
                "setting": describe(cell),
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


def _engine_charts(run: Run) -> Iterator[str]:
    # in words, what tells the groups of this run apart
    groups = {cell.group: ", ".join(_varying(run, cell, GROUP)) or cell.task for cell in run.cells}
    found = {
        (_method(cell), cell.group): spread(speedups(cell, plain))
        for cell in run.cells
        if cell.method != "plain" and (plain := plain_of(run, cell)) is not None
    }
    if found:
        methods = dict.fromkeys(method for method, _ in found)
        data = [Bars(each, [found.get((each, group)) for group in groups]) for each in methods]
        title = "Speedup over plain decoding"
        yield bars(title, "times plain decoding", list(groups.values()), data, line=1.0)
    by_batch: dict[str, list[Cell]] = {}
    for cell in sorted(run.cells, key=lambda cell: (cell.method == "plain", cell.batch)):
        rest = ", ".join(_varying(run, cell, [name for name in GROUP if name != "batch"]))
        by_batch.setdefault(f"{_method(cell)} {rest}".strip(), []).append(cell)
    if any(len(cells) > 1 for cells in by_batch.values()):
        pareto = []
        for name, cells in by_batch.items():
            totals = [(cell.batch, spread(rates(cell)).middle) for cell in cells]
            points = [(total / batch, total) for batch, total in totals]
            pareto.append(Curve(name, points, [str(batch) for batch, _ in totals]))
        title = "Speed of one sequence against all of them (numbers: batch)"
        yield curves(title, "tokens/s per sequence", "tokens/s in all", pareto)
    accepted = [
        Curve(f"{_method(cell)} {groups[cell.group]}", list(enumerate(cell.kept, 1)))
        for cell in run.cells
        if cell.kept
    ]
    if accepted:
        yield curves("Acceptance by position", "draft", "share of rounds that kept it", accepted)


def server_page(run: ServerRun) -> Page:
    """The page of a run: throughput and latency by load."""
    about = [
        f"Server: {run.url}, asked by {run.protocol}. What follows is the client's.",
        *measured_on(run.machine, run.versions),
        f"Options: {in_words(run.options)}.",
        *[INTERRUPTED] * (not run.complete),
    ]
    rows = [
        {
            "load": str(level),
            "answers": str(level.requests - level.errors),
            "errors": str(level.errors),
            "tokens": str(level.tokens),
            "tokens/s in all": f"{level.total:.0f}",
            "tokens/s of one": f"{level.per_user:.0f}",
            "after its first token": f"{level.after_first:.0f}",
            "rounds": "" if level.rounds is None else str(level.rounds),
            "tau": "" if level.tau is None else f"{level.tau:.2f}",
            "good answers/s": f"{level.good:.2f}",
            "prompt tokens": str(level.prompt_tokens),
            "reused": "" if level.cached_tokens is None else str(level.cached_tokens),
        }
        for level in run.levels
    ]
    note = (
        "Of one: an answer's tokens over its time from request to end, median. Good answers keep "
        "both goals of the options (milliseconds). Reused: prompt tokens that were not computed."
    )
    tables = [Table("Throughput", note, rows)]
    rows = [
        {
            "load": str(level),
            "to the first token": _ms(level.first_token),
            "in later turns": _ms(level.later_first_token),
            "between tokens": _ms(level.inter_token),
            "whole answer": _ms(level.whole),
        }
        for level in run.levels
    ]
    percents = "/".join(map(str, PERCENTILES))
    note = f"Milliseconds, percentiles {percents}. Between tokens: an answer's mean."
    tables.append(Table("Latency", note, rows))
    failed = [(level, level.first_error) for level in run.levels if level.first_error]
    rows = [{"load": str(level), "error": error} for level, error in failed]
    tables.append(Table("Errors", "The first of each load.", rows))
    return Page(f"{run.url}: server benchmark", about, list(_server_charts(run)), tables)


def _server_charts(run: ServerRun) -> Iterator[str]:
    closed = [level for level in run.levels if level.users is not None]
    if closed:
        points = [(level.per_user, level.total) for level in closed]
        title = "Speed of one user against all of them (numbers: users)"
        data = [Curve(run.protocol, points, [str(level.users) for level in closed])]
        yield curves(title, "tokens/s of one user", "tokens/s in all", data)
    timed = [level for level in run.levels if level.first_token]
    if timed:
        first = [
            Bars(f"p{percent}", [(1e3 * level.first_token[k],) * 3 for level in timed])
            for k, percent in enumerate(PERCENTILES)
        ]
        yield bars("Time to the first token", "milliseconds", [*map(str, timed)], first)


def measured_on(machine: Mapping[str, Any], versions: Mapping[str, str]) -> list[str]:
    """Machine and versions in words."""
    load = ", ".join(f"{value:.2f}" for value in machine["load_average"])
    return [
        f"Machine: {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['memory'] / 2**30:.0f} GiB, {machine['system']}; load {load}.",
        "Versions: " + ", ".join(f"{name} {value}" for name, value in versions.items()) + ".",
    ]


def in_words(options: Mapping[str, Any]) -> str:
    """The options that were given, as one line."""
    chosen = {name.replace("_", " "): value for name, value in options.items() if value != "None"}
    return ", ".join(f"{name} {value}" for name, value in chosen.items())


def _method(cell: Cell) -> str:
    drafts = "auto" if cell.draft_tokens is None else cell.draft_tokens
    return cell.method if cell.method == "plain" else f"{cell.method} ({drafts})"


def _varying(run: Run, cell: Cell, names: Sequence[str]) -> list[str]:
    """In words, those of a cell's values in which the run's cells differ."""
    varying = [name for name in names if len({getattr(c, name) for c in run.cells}) > 1]
    values = {name: getattr(cell, name) for name in varying}
    return [
        str(value) if name == "task" else f"{name} {'as-is' if value is None else f'{value:g}'}"
        for name, value in values.items()
    ]


def _row(cell: Cell, values: Mapping[str, float], form: str) -> dict[str, str]:
    return {"setting": describe(cell), **{name: f"{x:{form}}" for name, x in values.items()}}


def _spread(values: Sequence[float], form: str) -> str:
    middle, low, high = spread(values)
    return f"{middle:{form}} ({low:{form}} to {high:{form}})"


def _ms(times: Sequence[float]) -> str:
    return " / ".join(f"{1e3 * value:.1f}" for value in times)

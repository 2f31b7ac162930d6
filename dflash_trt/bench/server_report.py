"""A run of `bench serve` as a page."""

from dflash_trt.bench.page import Page, Table
from dflash_trt.bench.results import PERCENTILES, Level, ServerRun, in_words, measured_on
from dflash_trt.charts import Bars, Curve, bars, curves


def server_page(run: ServerRun) -> Page:
    """Throughput and latency by load."""
    about = [
        f"Server: {run.url}, asked by {run.protocol}. What follows is the client's.",
        *measured_on(run.machine, run.versions),
        f"Options: {in_words(run.options)}.",
    ]
    if not run.complete:
        about.append("Interrupted: what was measured until then.")
    head = ["load", "answers", "errors", "tokens", "tokens/s in all", "tokens/s of one"]
    head += ["rounds", "tau", "good answers/s"]
    rows = [
        [
            load_name(level),
            str(level.requests - level.errors),
            str(level.errors),
            str(level.tokens),
            f"{level.total:.0f}",
            f"{level.per_user:.0f}",
            "" if level.rounds is None else str(level.rounds),
            "" if level.tau is None else f"{level.tau:.2f}",
            f"{level.good:.2f}",
        ]
        for level in run.levels
    ]
    note = (
        "Of one: an answer's tokens over its time from request to end, median. Good answers keep "
        "both goals of the options (milliseconds)."
    )
    tables = [Table("Throughput", note, head, rows)]
    percents = "/".join(map(str, PERCENTILES))
    note = f"Milliseconds, percentiles {percents}. Between tokens: an answer's mean."
    head = ["load", "to the first token", "between tokens", "whole answer"]
    rows = [
        [
            load_name(level),
            *(_ms(times) for times in (level.first_token, level.inter_token, level.whole)),
        ]
        for level in run.levels
    ]
    tables.append(Table("Latency", note, head, rows))
    failed = [level for level in run.levels if level.first_error]
    if failed:
        rows = [[load_name(level), level.first_error or ""] for level in failed]
        tables.append(Table("Errors", "The first of each load.", ["load", "error"], rows))
    return Page(f"{run.url}: server benchmark", about, _charts(run), tables)


def load_name(level: Level) -> str:
    if level.users is None:
        return f"{level.rate:g} requests/s"
    return f"{level.users} user{'s' * (level.users != 1)}"


def _charts(run: ServerRun) -> list[str]:
    closed = [level for level in run.levels if level.users is not None]
    charts = []
    if closed:
        points = [(level.per_user, level.total) for level in closed]
        charts.append(
            curves(
                "Speed of one user against all of them (numbers: users)",
                "tokens/s of one user",
                "tokens/s in all",
                [Curve(run.protocol, points, [str(level.users) for level in closed])],
            )
        )
    timed = [level for level in run.levels if level.first_token]
    if timed:
        data = [
            Bars(f"p{percent}", [(1e3 * level.first_token[k],) * 3 for level in timed])
            for k, percent in enumerate(PERCENTILES)
        ]
        names = [load_name(level) for level in timed]
        charts.append(bars("Time to the first token", "milliseconds", names, data))
    return charts


def _ms(times: list[float]) -> str:
    return " / ".join(f"{1e3 * value:.1f}" for value in times)

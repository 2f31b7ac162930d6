"""The page of a matrix: what one user gets over what a GPU gives, by method, users and prompts."""

from collections.abc import Iterator

from dflash_trt.bench.page import Page, Table
from dflash_trt.bench.report import INTERRUPTED, in_words, measured_on, published_tables
from dflash_trt.bench.results import Level, MatrixCell, MatrixRun, in_users
from dflash_trt.charts import Curve, curves

Group = tuple[str, str]  # prompts and thinking
HOUR = 3600  # seconds


def matrix_page(run: MatrixRun) -> Page:
    """The axes of published figures first; these stand in a table of their own."""
    gpus = {cell.gpus for cell in run.cells if cell.level} - {0}
    of_what = f"{max(gpus)} x {', '.join(sorted({*run.gpus}))}" if gpus else "no GPU: the CPU's"
    about = [
        f"Server: {of_what}; a build of each method, for as many sequences at once as there are "
        "users at most.",
        *measured_on(run.machine, run.versions),
        f"Options: {in_words(run.options)}.",
        "Every load was measured once, greedy, past the end of texts, and no prompt found an "
        "earlier one's KV cache.",
        *[INTERRUPTED] * (not run.complete),
    ]
    published = published_tables(run.hub.get("target", ""), run.hub.get("drafter", ""))
    title = f"{run.name}: methods, users and prompts"
    return Page(title, about, list(_charts(run, bool(gpus))), [*_tables(run), *published])


def _charts(run: MatrixRun, gpus: bool) -> Iterator[str]:
    groups: dict[Group, dict[str, list[MatrixCell]]] = {}
    for cell in sorted(run.cells, key=lambda cell: cell.users):
        if cell.level is not None and cell.level.after_first:
            methods = groups.setdefault((cell.prompts, cell.thinking), {})
            methods.setdefault(cell.method, []).append(cell)
    per = "a GPU" if gpus else "this machine"
    for group, methods in groups.items():
        data = [
            Curve(
                method,
                [(_level(cell).after_first, cell.per_gpu) for cell in cells],
                [str(cell.users) for cell in cells],
                [_hint(cell, per) for cell in cells],
            )
            for method, cells in methods.items()
        ]
        title = f"{_named(group)}: tokens/s of {per} and of a user (numbers: users)"
        x_label = "tokens/s of a user, after the first token"
        yield curves(title, x_label, f"output tokens/s of {per}", data)
    fewest = min((cell.users for cell in run.cells), default=0)
    kept = [
        Curve(f"{cell.method}, {_named((cell.prompts, cell.thinking))}", [*enumerate(shares, 1)])
        for cell in run.cells
        if cell.users == fewest and cell.level and (shares := cell.level.kept)
    ]
    if kept:
        title = f"Acceptance by position, {in_users(fewest)}"
        yield curves(title, "draft", "share of rounds that kept it", kept)


def _tables(run: MatrixRun) -> Iterator[Table]:
    measured = [cell for cell in run.cells if cell.level is not None]
    plain = {
        (cell.users, cell.prompts, cell.thinking): _level(cell)
        for cell in measured
        if cell.method == "none"
    }
    rows = []
    for cell in measured:
        level = _level(cell)
        beside = plain.get((cell.users, cell.prompts, cell.thinking))
        times = [level.after_first, level.total]
        than = [beside.after_first, beside.total] if beside is not None else []
        over = [f"{a / b:.2f}" for a, b in zip(times, than, strict=False) if b]
        rows.append(
            {
                "cell": str(cell),
                "tokens/s of a GPU" if cell.gpus else "tokens/s": f"{cell.per_gpu:.0f}",
                "of a user": f"{level.after_first:.0f}",
                "user, server over none": " / ".join(over) if cell.method != "none" else "",
                "tau": f"{level.tau:.2f}" if level.tau and cell.method != "none" else "",
                "to the first token": _first(level),
                "good answers/s": f"{level.good:.2f}",
                "cost of a million tokens": _cost(level, run.price),
                "answers": str(level.requests - level.errors),
                "tokens": str(level.tokens),
            }
        )
    note = (
        "Output tokens. Of a user: after the first token, median of the answers. To the first "
        "token: milliseconds, median and 99th percentile. Good answers keep both goals of the "
        "options (milliseconds). Cost: the price of the machine's hour over the output tokens of "
        "one, prompts included."
    )
    yield Table("Speed", note, rows)
    shares = [
        {"cell": str(cell), **{f"draft {i}": f"{x:.2f}" for i, x in enumerate(level.kept, 1)}}
        for cell in measured
        if (level := _level(cell)).kept
    ]
    note = (
        "Share of rounds that kept this draft and all before it; tau is 1 and their sum. Rounds "
        "that verified no drafts count."
    )
    yield Table("Acceptance by position", note, shares)
    failed = [{"cell": str(cell), "why": cell.error} for cell in run.cells if cell.error]
    note = "The same command tries them again."
    yield Table("Not measured, or not whole", note, failed)


def _level(cell: MatrixCell) -> Level:
    assert cell.level is not None
    return cell.level


def _named(group: Group) -> str:
    prompts, thinking = group
    return prompts if thinking == "default" else f"{prompts}, thinking {thinking}"


def _hint(cell: MatrixCell, per: str) -> str:
    speed = f"{_level(cell).after_first:,.0f} tokens/s a user"
    return f"{cell}: {speed}, {cell.per_gpu:,.0f} of {per}"


def _first(level: Level) -> str:
    return " / ".join(f"{1e3 * t:.0f}" for t in (*level.first_token[:1], *level.first_token[-1:]))


def _cost(level: Level, price: float | None) -> str:
    return f"{price / (level.total * HOUR) * 1e6:.3g}" if price and level.total else ""

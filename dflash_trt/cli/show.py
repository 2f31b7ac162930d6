"""Text reports of `inspect` and `doctor`, colored on a terminal."""

from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console
from rich.text import Text

from dflash_trt.cli.output import printable

Styled = list[tuple[str, str]]  # texts of a line with styles

COLORS = {
    "passed": "green",
    "fits": "green",
    "warning": "bold yellow",
    "error": "bold red",
    "does not fit": "bold red",
    "refused": "bold red",
}


def text_console(width: int = 0) -> Console:
    """Return a console of at least this width: narrow terminals wrap tables, losing nothing."""
    console = Console(soft_wrap=True, highlight=False)
    console.width = max(console.width, width)
    return console


def show(report: dict[str, Any]) -> None:
    _print(_report_lines(report))


def show_checks(checks: list[dict[str, Any]]) -> None:
    _print(_finding_lines(checks))


def _print(lines: Iterable[Styled]) -> None:
    console = text_console()
    for line in lines:
        console.print(Text.assemble(*((printable(text), style) for text, style in line)))


def _report_lines(report: dict[str, Any]) -> Iterator[Styled]:
    for role in ("target", "drafter"):
        if role in report:
            yield from _model_lines(role, report[role])
    if chats := report.get("chats"):
        yield [("chats", "bold")]
        yield from ([(f"  {kind:<24}{how}", "")] for kind, how in chats.items())
    yield [("checks", "bold")]
    yield from _finding_lines(report["checks"])
    yield [("engine kinds", "bold")]
    for kind in report["engine_kinds"]:
        yield _result_line("fits" if kind["fits"] else "does not fit", kind["kind"])
        for reason in (*kind["reasons"], *kind["notes"]):
            yield [(f"{'':<16}{reason}", "")]


def _finding_lines(checks: list[dict[str, Any]]) -> Iterator[Styled]:
    for check in checks:
        yield _result_line(check["result"], f"{check['name']:<22} {check['found']}")
        if check["fix"]:
            yield [(f"{'':<38}-> {check['fix']}", "bold")]


def _model_lines(role: str, about: dict[str, Any]) -> Iterator[Styled]:
    yield [(role, "bold"), (f"  {about['architecture'] or 'unknown'}  {about['directory']}", "")]
    if about["refused"]:
        yield _result_line("refused", f"{about['refused']['problem']}. {about['refused']['fix']}.")
    for name, value in about.items():
        if value is not None and name not in ("architecture", "directory", "refused"):
            yield [(f"  {name:<26}{on_one_line(value)}", "")]


def on_one_line(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {on_one_line(entry)}" for name, entry in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return f"{value:,}" if type(value) is int else str(value)


def _result_line(result: str, text: str) -> Styled:
    return [("  ", ""), (f"{result:<14}", COLORS.get(result, "")), (text, "")]

"""Shared parts of commands: options, progress on stderr, JSON on stdout, files of text."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

Report = Callable[[str, int, int], None]  # step, parts done, parts in all
Built = Annotated[Path, typer.Argument(help="Directory that `build` wrote.")]
Config = Annotated[Path, typer.Argument(help="Build config, YAML (see `schema`).")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
Check = Annotated[
    Literal["none", "quick", "full"] | None,
    typer.Option(
        help="How files are compared with the manifest: quick compares those from 256 MiB on by "
        "size only. Default: full up to 16 GiB."
    ),
]


def print_json(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def printable(text: str) -> str:
    """Return the text with escapes: a downloaded file may hold anything, even for a terminal."""
    return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text)


@contextmanager
def reporting() -> Iterator[Report]:
    """Yield `report(step, done, total)`: bars on a terminal, elsewhere one line a step."""
    if not sys.stderr.isatty():
        begun: set[str] = set()

        def print_step(step: str, done: int, total: int) -> None:
            if step not in begun:
                begun.add(step)
                with suppress(OSError):  # the reader may be gone: the work is worth more
                    print(f"{step} ({total}) ...", file=sys.stderr, flush=True)

        yield print_step
        return

    from rich.console import Console  # noqa: PLC0415
    from rich.progress import (  # noqa: PLC0415
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as bars:
        tasks = {}

        def move_bar(step: str, done: int, total: int) -> None:
            if step not in tasks:
                tasks[step] = bars.add_task(step, total=total)
            bars.update(tasks[step], completed=done, total=total)

        yield move_bar

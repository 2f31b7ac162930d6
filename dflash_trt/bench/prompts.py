"""Where a benchmark's prompts come from, by name."""

import json
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import numpy as np

from dflash_trt.bench.tasks import TASKS, task_texts
from dflash_trt.checkpoints.tokenizer import load_tokenizer
from dflash_trt.errors import RequestError
from dflash_trt.prompts import read_prompts
from dflash_trt.serving.chat import load_asking

PYCODE, SYNTHETIC = "pycode", "synthetic:"


def load_task(
    name: str, tokenizer: Path, *, vocab_size: int, longest: int, count: int
) -> list[list[int]]:
    """At most `count` prompts as token ids; RequestError for a name that says nothing.

    name: "pycode" (40 beginnings of Python files, held out from the demo pair's training),
    "synthetic:LENGTH" (random tokens: for speed at a length, drafts are not accepted), one of
    `TASKS` (as messages where the tokenizer has a chat template, without thinking), or a file of
    JSON lines. tokenizer: its directory. longest: tokens that a prompt may have; longer ones of
    `TASKS` are left out.
    """
    if name.startswith(SYNTHETIC):
        length = name.removeprefix(SYNTHETIC)
        if not length.isdigit() or not 1 <= int(length) <= longest:
            raise RequestError(f"{name} is not synthetic:1 to synthetic:{longest}", "Correct it")
        drawn = np.random.default_rng(0).integers(vocab_size, size=(count, int(length)))
        return [list(map(int, line)) for line in drawn]
    if name in TASKS:
        ask = load_asking(tokenizer, enable_thinking=False)  # as in the paper's Table 1
        asked = map(ask, task_texts(name))
        prompts = list(islice((ids for ids in asked if 0 < len(ids) <= longest), count))
        if not prompts:
            raise RequestError(
                f"every prompt of {name} is longer than {longest} tokens, what fits beside "
                "--max-tokens",
                "Build with a larger serving.max_seq_len",
            )
        return prompts
    path = _file(name)
    known = load_tokenizer(tokenizer)
    found = read_prompts(
        path, lambda text: list(known.encode(text).ids), vocab_size=vocab_size, longest=longest
    )
    return found[:count]


def load_texts(name: str, count: int) -> list[str]:
    """At most `count` prompts of "pycode", of `TASKS` or of a file as text, for a server."""
    if name in TASKS:
        return list(islice(task_texts(name), count))
    path = _file(name)
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
        texts = [json.loads(line)["text"] for line in lines if line.strip()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequestError(
            f"{path} is no file of prompts for a server ({error})",
            'Give one with {"text": ...} in each line',
        ) from error
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise RequestError(f"{path} holds no prompt, or an empty one", "Correct it")
    return texts[:count]


def _file(name: str) -> Path:
    path = _pycode() if name == PYCODE else Path(name)
    if not path.exists():
        raise RequestError(
            f"cannot read {name}: it is no file and no name of prompts",
            f"Give a file of JSON lines, or one of {PYCODE}, {', '.join(TASKS)}",
        )
    return path


def _pycode() -> Path:
    """In a wheel beside this module, in a source checkout with the demo pair."""
    spec = find_spec("dflash_trt")
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    installed = package / "bench" / "pycode.jsonl"
    return installed if installed.is_file() else package.parent / "examples/pycode/prompts.jsonl"

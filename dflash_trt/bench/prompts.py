"""Where a benchmark's prompts come from, by name."""

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from dflash_trt.errors import RequestError
from dflash_trt.prompts import read_prompts

PYCODE, SYNTHETIC = "pycode", "synthetic:"


def load_task(
    name: str, encode: Callable[[str], list[int]], *, vocab_size: int, longest: int, count: int
) -> list[list[int]]:
    """At most `count` prompts as token ids; RequestError for a name that says nothing.

    name: "pycode" (40 beginnings of Python files, held out from the demo pair's training),
    "synthetic:LENGTH" (random tokens: for speed at a length, drafts are not accepted), or a file
    of JSON lines. longest: tokens that a prompt may have.
    """
    if name.startswith(SYNTHETIC):
        length = name.removeprefix(SYNTHETIC)
        if not length.isdigit() or not 1 <= int(length) <= longest:
            raise RequestError(f"{name} is not synthetic:1 to synthetic:{longest}", "Correct it")
        drawn = np.random.default_rng(0).integers(vocab_size, size=(count, int(length)))
        return [list(map(int, line)) for line in drawn]
    path = _pycode() if name == PYCODE else Path(name)
    return read_prompts(path, encode, vocab_size=vocab_size, longest=longest)[:count]


def load_texts(name: str) -> list[str]:
    """The prompts of "pycode" or of a file of JSON lines as text, for a server."""
    path = _pycode() if name == PYCODE else Path(name)
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
    return texts


def _pycode() -> Path:
    """In a wheel beside this module, in a source checkout with the demo pair."""
    spec = find_spec("dflash_trt")
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    installed = package / "bench" / "pycode.jsonl"
    return installed if installed.is_file() else package.parent / "examples/pycode/prompts.jsonl"

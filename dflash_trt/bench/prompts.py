"""Where a benchmark's prompts come from, by name."""

from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import numpy as np

from dflash_trt.bench.tasks import TASKS, task_texts
from dflash_trt.chat.render import as_chat, load_encoding
from dflash_trt.errors import RequestError
from dflash_trt.files import parse_json
from dflash_trt.prompts import Prompt, prompt_of, read_lines, read_prompts

PYCODE, SYNTHETIC = "pycode", "synthetic:"
TEMPLATE_OPTIONS = {"enable_thinking": False}  # as in the paper's Table 1


def load_task(
    name: str, tokenizer: Path, *, vocab_size: int, longest: int, count: int
) -> list[list[int]]:
    """At most `count` prompts as token ids; RequestError for a name that says nothing.

    name: "pycode" (40 beginnings of Python files, held out from the demo pair's training),
    "synthetic:LENGTH" (random tokens: for speed at a length, drafts are not accepted), one of
    `TASKS`, or a file of JSON lines. Tasks and messages in a file go through the tokenizer's chat
    template, where it has one, without thinking. tokenizer: its directory. longest: tokens that a
    prompt may have; longer ones of `TASKS` are left out.
    """
    if name.startswith(SYNTHETIC):
        length = name.removeprefix(SYNTHETIC)
        if not length.isdigit() or not 1 <= int(length) <= longest:
            raise RequestError(f"{name} is not synthetic:1 to synthetic:{longest}", "Correct it")
        drawn = np.random.default_rng(0).integers(vocab_size, size=(count, int(length)))
        return [list(map(int, line)) for line in drawn]
    encode = load_encoding(tokenizer, **TEMPLATE_OPTIONS)
    if name in TASKS:
        asked = (encode(as_chat(text)) for text in task_texts(name))
        prompts = list(islice((ids for ids in asked if 0 < len(ids) <= longest), count))
        if not prompts:
            raise RequestError(
                f"every prompt of {name} is longer than {longest} tokens, what fits beside "
                "--max-tokens",
                "Build with a larger serving.max_seq_len",
            )
        return prompts
    return read_prompts(_file(name), encode, vocab_size=vocab_size, longest=longest)[:count]


def load_asked(name: str, count: int) -> list[Prompt]:
    """At most `count` prompts of "pycode", of `TASKS` or of a file, for a server to encode.

    Messages are for its chat template; tasks are such.
    """
    if name in TASKS:
        return [as_chat(text) for text in islice(task_texts(name), count)]
    path = _file(name)
    try:
        prompts = [prompt_of(parse_json(line)) for line in read_lines(path) if line.strip()]
    except ValueError as error:
        raise RequestError(
            f"{path} is no file of prompts for a server ({error})",
            'Give one with {"text": ...} or {"messages": [...]} in each line',
        ) from error
    if not prompts or not all(prompts):
        raise RequestError(f"{path} holds no prompt, or an empty one", "Correct it")
    return prompts[:count]


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

"""Where a benchmark's prompts come from, by name."""

from itertools import islice
from pathlib import Path

import numpy as np

import dflash_trt
from dflash_trt.bench.tasks import TASKS, task_texts
from dflash_trt.chat import as_chat, load_encoding
from dflash_trt.errors import RequestError
from dflash_trt.prompts import Prompt, prompt_of, read_lines, read_prompts

PYCODE, SYNTHETIC = "pycode", "synthetic:"
TEMPLATE_OPTIONS = {"enable_thinking": False}  # as in the paper's Table 1


def load_task(
    name: str, tokenizer: Path, *, vocab_size: int, longest: int, count: int
) -> list[list[int]]:
    """At most `count` prompts as token ids; RequestError for an unknown name.

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
    """At most `count` prompts of "pycode", of `TASKS` or of a file, for a server to encode.

    Messages are for its chat template; tasks are such.
    """

    def asked(entry: object) -> Prompt:
        if not (prompt := prompt_of(entry)):
            raise ValueError("the prompt is empty")
        return prompt

    if name in TASKS:
        return [as_chat(text) for text in islice(task_texts(name), count)]
    return read_lines(_file(name), asked)[:count]


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

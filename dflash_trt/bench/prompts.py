"""Prompts of benchmarks: the demo's, or a file."""

from pathlib import Path

from dflash_trt.chat import load_encoding
from dflash_trt.errors import RequestError
from dflash_trt.prompts import Prompt, prompt_of, read_lines, read_prompts

PYCODE = "pycode"


def load_task(
    name: str, tokenizer: Path, *, vocab_size: int, longest: int, count: int
) -> list[list[int]]:
    """Return at most `count` prompts as token ids.

    name: "pycode" (40 beginnings of Python files, held out from the demo pair's training), or a
    file of JSON lines, whose messages use the tokenizer's chat template, without thinking.
    tokenizer: its directory. longest: token limit.
    """
    encode = load_encoding(tokenizer, enable_thinking=False)  # as in the paper's Table 1
    return read_prompts(_prompt_file(name), encode, vocab_size=vocab_size, longest=longest)[:count]


def load_prompts(name: str, count: int) -> list[Prompt]:
    """Return at most `count` prompts of "pycode" or a file, for a server to encode.

    All are texts, or all are messages for its chat template.
    """

    def filled_prompt(entry: object) -> Prompt:
        prompt = prompt_of(entry)
        if not prompt:
            raise ValueError("the prompt is empty")
        return prompt

    prompts = read_lines(_prompt_file(name), filled_prompt)[:count]
    if len({isinstance(prompt, str) for prompt in prompts}) > 1:
        raise RequestError(f"{name} has texts and messages", "Give a file of each")
    return prompts


def _prompt_file(name: str) -> Path:
    return Path(__file__).with_name("pycode.jsonl") if name == PYCODE else Path(name)

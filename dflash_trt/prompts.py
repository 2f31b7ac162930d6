"""Prompt files: JSON lines with `text`, `messages` or `ids`."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from dflash_trt.errors import RequestError
from dflash_trt.files import parse_json, read_text

MAX_PROMPTS = 1 << 26  # bytes of a file
Prompt = str | Sequence[Mapping[str, Any]]  # a text, or messages for the chat template
AnyPrompt = Prompt | Sequence[int]  # or token ids
T = TypeVar("T")
NO_PROMPT = (
    'not an object with "text" (a string), "messages" (a list of objects with a role) or "ids" '
    "(a list of integers)"
)


def read_prompts(
    path: Path, encode: Callable[[Prompt], list[int]], *, vocab_size: int, longest: int
) -> list[list[int]]:
    """Return the token ids of every line: its `ids`, else its encoded text or messages.

    longest: token limit of a prompt. Raises RequestError naming file and line.
    """

    def ids_of(entry: object) -> list[int]:
        ids = entry["ids"] if isinstance(entry, dict) and "ids" in entry else None
        if ids is None:
            ids = encode(prompt_of(entry))
        elif not isinstance(ids, list) or any(type(token) is not int for token in ids):
            raise ValueError(NO_PROMPT)
        if not ids:
            raise ValueError("the prompt is empty")
        if not all(0 <= token < vocab_size for token in ids):
            raise ValueError(f"a token id is outside 0 to {vocab_size - 1}")
        if len(ids) > longest:
            raise ValueError(
                f"the prompt has {len(ids)} tokens, at most {longest} fit beside --max-tokens"
            )
        return ids

    return read_lines(path, ids_of)


def read_lines(path: Path, parse: Callable[[object], T]) -> list[T]:
    """Return `parse` of each line's JSON, without blank lines; RequestError names the line."""
    try:
        lines = read_text(path, MAX_PROMPTS).split("\n")  # not at U+2028, which JSON allows
    except OSError as error:
        raise RequestError(
            f"cannot read {path}: {error.strerror}",
            'Give a file with one {"text": ...}, {"messages": [...]} or {"ids": [...]} a line',
        ) from error
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not UTF-8 text", "Save the prompts as UTF-8") from error
    prompts = []
    for number, line in enumerate(lines, 1):
        try:
            prompts += [parse(parse_json(line))] if line.strip() else []
        except ValueError as error:
            raise RequestError(
                f"{path}:{number}: {error}", "Correct or remove that line"
            ) from error
    if not prompts:
        raise RequestError(f"{path} holds no prompt", "Give at least one line")
    return prompts


def prompt_of(entry: object) -> Prompt:
    """Return the `messages` (objects with a role) or `text` of a line, or raise ValueError."""
    json.dumps(entry, ensure_ascii=False).encode()  # ValueError: half a surrogate pair
    if isinstance(entry, dict):
        text, messages = entry.get("text"), entry.get("messages")
        if isinstance(messages, list) and all(
            isinstance(message, dict) and isinstance(message.get("role"), str)
            for message in messages
        ):
            return messages
        if isinstance(text, str) and "messages" not in entry:
            return text
    raise ValueError(NO_PROMPT)

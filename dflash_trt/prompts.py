"""Prompt files: JSON lines with `text`, `messages` or `ids`."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_trt.errors import RequestError
from dflash_trt.files import parse_json, read_text

MAX_PROMPTS = 1 << 26  # bytes of a file of them
Prompt = str | Sequence[Mapping[str, Any]]  # a text as it is, or messages for the chat template
AnyPrompt = Prompt | Sequence[int]  # or token ids
WRONG = (
    'not an object with "text" (a string), "messages" (a list of objects with a role) or "ids" '
    "(a list of integers)"
)


def read_prompts(
    path: Path, encode: Callable[[Prompt], list[int]], *, vocab_size: int, longest: int
) -> list[list[int]]:
    """The token ids of every line; blank lines are skipped.

    longest: tokens that a prompt may have. Raises RequestError naming file and line.
    """
    prompts = []
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        try:
            ids = _ids(parse_json(line), encode)
            if not ids:
                raise ValueError("the prompt is empty")
            if not all(0 <= token < vocab_size for token in ids):
                raise ValueError(f"a token id is outside 0 to {vocab_size - 1}")
            if len(ids) > longest:
                raise ValueError(
                    f"the prompt has {len(ids)} tokens, at most {longest} fit beside --max-tokens"
                )
        except ValueError as error:
            raise RequestError(
                f"{path}:{number}: {error}", "Correct or remove that line"
            ) from error
        prompts.append(ids)
    if not prompts:
        raise RequestError(f"{path} holds no prompt", "Give at least one line")
    return prompts


def read_lines(path: Path) -> list[str]:
    """The lines of a file of prompts; RequestError."""
    try:
        return read_text(path, MAX_PROMPTS).split("\n")  # not at U+2028, which JSON allows
    except OSError as error:
        raise RequestError(
            f"cannot read {path}: {error.strerror}",
            'Give a file with one {"text": ...}, {"messages": [...]} or {"ids": [...]} a line',
        ) from error
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not UTF-8 text", "Save the prompts as UTF-8") from error


def _ids(entry: object, encode: Callable[[Prompt], list[int]]) -> list[int]:
    """`ids` when a line has more; ValueError says what is wrong with the line."""
    if not isinstance(entry, dict) or "ids" not in entry:
        return encode(prompt_of(entry))
    ids = entry["ids"]
    if isinstance(ids, list) and all(type(token) is int for token in ids):
        return ids
    raise ValueError(WRONG)


def prompt_of(entry: object) -> Prompt:
    """The `messages` of a line (a list of objects with a role), else its `text`; or ValueError."""
    json.dumps(entry, ensure_ascii=False).encode()  # ValueError: half a surrogate pair is no text
    if isinstance(entry, dict):
        text, messages = entry.get("text"), entry.get("messages")
        if isinstance(messages, list) and all(
            isinstance(each, dict) and isinstance(each.get("role"), str) for each in messages
        ):
            return messages
        if isinstance(text, str) and "messages" not in entry:
            return text
    raise ValueError(WRONG)

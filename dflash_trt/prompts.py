"""Prompt files: JSON lines with `text` or `ids`."""

import json
from collections.abc import Callable
from pathlib import Path

from dflash_trt.errors import RequestError


def read_prompts(
    path: Path, encode: Callable[[str], list[int]], *, vocab_size: int, longest: int
) -> list[list[int]]:
    """The token ids of every line; blank lines are skipped.

    longest: tokens that a prompt may have. Raises RequestError naming file and line.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # not at U+2028, which JSON allows
    except OSError as error:
        raise RequestError(
            f"cannot read {path}: {error.strerror}",
            'Give a file with one {"text": ...} or {"ids": [...]} a line',
        ) from error
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not UTF-8 text", "Save the prompts as UTF-8") from error
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            ids = _ids(json.loads(line), encode)
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


def _ids(entry: object, encode: Callable[[str], list[int]]) -> list[int]:
    """`ids` when a line has both; ValueError says what is wrong with the line."""
    if isinstance(entry, dict):
        ids, text = entry.get("ids"), entry.get("text")
        if isinstance(ids, list) and all(type(token) is int for token in ids):
            return ids
        if isinstance(text, str) and "ids" not in entry:
            return encode(text)
    raise ValueError('not an object with "text" (a string) or "ids" (a list of integers)')

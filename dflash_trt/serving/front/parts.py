"""What goes back to a client; the fields are the output tensors of the public model."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np


@dataclass
class Part:
    """News of some choices: new text and tokens, and the totals so far.

    Lists have an element for each choice in it (one, in a stream); those of tokens and rounds are
    one choice after the other.
    """

    index: list[int]  # which choice
    text_output: list[str]
    finish_reason: list[str]  # "" until a choice's last part
    token_ids: list[int]
    token_sources: list[int]  # `speculation.SOURCES` of each token, where the decoder tells
    round_tokens: list[int]  # tokens that each round committed
    prompt_tokens: int
    completion_tokens: list[int]
    rounds: list[int]
    drafted: list[int]
    accepted: list[int]
    acceptance_length: list[float]
    time_to_first_token: list[float]  # seconds; 0 if none came
    token_logprobs: list[float] = field(default_factory=list)  # per token, where asked for
    top_token_ids: list[list[int]] = field(default_factory=list)
    top_logprobs: list[list[float]] = field(default_factory=list)


ADDED = (
    "token_ids",
    "token_sources",
    "round_tokens",
    "token_logprobs",
    "top_token_ids",
    "top_logprobs",
)


def follow(first: Part, second: Part) -> Part:
    """Two parts of one choice, one after the other, as one."""
    values = {name: getattr(first, name) + getattr(second, name) for name in ADDED}
    text = [first.text_output[0] + second.text_output[0]]
    return Part(**{**vars(second), **values, "text_output": text})


def beside(parts: Sequence[Part]) -> Part:
    """The only parts of several choices as one."""
    joined: dict[str, Any] = {
        name: [element for part in parts for element in getattr(part, name)]
        for name in vars(parts[0])
        if name != "prompt_tokens"
    }
    return Part(prompt_tokens=parts[0].prompt_tokens, **joined)


def arrays(part: Part) -> dict[str, "np.ndarray[Any, Any]"]:
    """The output tensors: strings as bytes, numbers as int32 or float32, `[k]` or `[tokens]`.

    The best alternatives are `[tokens, K]`.
    """
    result: dict[str, np.ndarray[Any, Any]] = {}
    for each in fields(part):
        value = getattr(part, each.name)
        if each.name in ("text_output", "finish_reason"):
            array = np.array([text.encode() for text in value], dtype=object)
        else:
            floats = "float" in str(each.type)
            array = np.atleast_1d(np.array(value, np.float32 if floats else np.int32))
            if each.name.startswith("top_"):
                array = array.reshape(len(value), -1) if value else array.reshape(0, 0)
        result[each.name] = array
    return result

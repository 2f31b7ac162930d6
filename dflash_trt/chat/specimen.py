"""Specimens of chats: the same roles and calls with marks as contents, to see what is shown."""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_trt.chat.messages import THOUGHT, Message

MARK = re.compile(r"zq(\d+)(?:[nv]\d+)?z")  # with the message's number
TEXT_MARK = re.compile(r"zq\d+z")  # of a message's text; others are in its calls
REPLIES = ("assistant", "tool")  # roles whose messages may be left out where nothing shows them


def specimen_of(messages: Sequence[Message]) -> list[Message]:
    """Return messages that a template treats alike, with marks as texts and calls."""
    result = list[Message]()
    functions = dict[str, str]()  # marks of functions, by call id
    for index, message in enumerate(messages):
        content = f"zq{index}z" if message["content"] else ""
        specimen: Message = {"role": message["role"], "content": content}
        if THOUGHT in message:
            specimen[THOUGHT] = "thought"
        if "tool_call_id" in message:
            name = functions.get(str(message["tool_call_id"]), "unknown")
            specimen |= {"tool_call_id": f"id-of-{name}", "name": name}
        for number, call in enumerate(message.get("tool_calls", ())):
            functions[call["id"]] = f"zq{index}n{number}z"
            specimen.setdefault("tool_calls", []).append(specimen_call(index, number))
        result.append(specimen)
    return result


def specimen_call(message: int, number: int = 0) -> dict[str, Any]:
    """Return a call with marks as its name and its argument; both count from 0."""
    name = f"zq{message}n{number}z"
    function = {"name": name, "arguments": {"probe_key": f"zq{message}v{number}z"}}
    return {"id": f"id-of-{name}", "type": "function", "function": function}


@dataclass(frozen=True, order=True)
class Loss:
    """How much of a chat a template leaves out; smaller is better."""

    instructions_and_questions: int  # and other roles that a client made up
    calls_and_results: int
    texts: int  # of the assistant


NOTHING_LOST = Loss(0, 0, 0)


def lost_marks(specimen: Sequence[Message], text: str) -> set[str]:
    """Return the marks of a specimen that a template's text does not show."""
    return _marks(json.dumps(specimen)) - _marks(text)


def _marks(text: str) -> set[str]:
    return {match[0] for match in MARK.finditer(text)}


def loss_of(specimen: Sequence[Message], lost: Iterable[str]) -> Loss:
    instructions = 0
    calls = 0
    texts = 0
    for mark in lost:
        role = specimen[_message_of(mark)]["role"]
        if role not in REPLIES:
            instructions += 1
        elif role == "tool" or not TEXT_MARK.fullmatch(mark):
            calls += 1
        else:
            texts += 1
    return Loss(instructions, calls, texts)


def refused_messages(specimen: Sequence[Message], lost: Iterable[str]) -> tuple[int, ...]:
    """Return the numbers of messages that must not be lost: the answer would be to another chat."""
    numbers = {_message_of(mark) for mark in lost}
    return tuple(sorted(n for n in numbers if specimen[n]["role"] not in REPLIES))


def _message_of(mark: str) -> int:
    return int(MARK.findall(mark)[0])

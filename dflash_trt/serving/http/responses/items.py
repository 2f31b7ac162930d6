"""Items of a conversation in `/v1/responses` as messages of a chat, and where each came from."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dflash_trt.serving.http.failures import Failure
from dflash_trt.serving.http.responses.tools import call_of

Json = dict[str, Any]
CALLS = ("function_call", "custom_tool_call")
OUTPUTS = ("function_call_output", "custom_tool_call_output")
ORDER = ("role", "reasoning_content", "content", "tool_calls")  # in one message of a chat
PLACE = re.compile(r"messages\[(\d{1,6})\](?:\.tool_calls\[(\d{1,6})\])?")


@dataclass(frozen=True)
class Placed:
    """An item, and its place in the request: `input[3]`, or the response that it is kept in."""

    place: str
    item: Any


@dataclass
class Messages:
    """A chat; an assistant's reasoning, text and calls in a row are one message of it."""

    messages: list[Json] = field(default_factory=list)
    places: list[str] = field(default_factory=list)  # of each message
    call_places: list[list[str]] = field(default_factory=list)  # of each call of each message

    def add(self, place: str, message: Json) -> None:
        calls = [place] if "tool_calls" in message else []
        if self.messages and _join(self.messages[-1], message):
            self.call_places[-1] += calls
            return
        self.messages.append(message)
        self.places.append(place)
        self.call_places.append(calls)

    def in_words_of_the_request(self, text: str) -> str:
        """Return a text with places of the request instead of messages."""

        def place_of(match: re.Match[str]) -> str:
            index = int(match[1])
            if index >= len(self.places):
                return match[0]
            calls = self.call_places[index]
            if match[2] is not None and int(match[2]) < len(calls):
                return calls[int(match[2])]
            return self.places[index]

        return PLACE.sub(place_of, text)


def _join(last: Json, message: Json) -> bool:
    """Add an assistant's message to the one before it, and return whether it fits there."""
    if not last["role"] == message["role"] == "assistant":
        return False
    if "tool_calls" in last and "tool_calls" in message:
        last["tool_calls"] += message["tool_calls"]
        return True
    if max(map(ORDER.index, last)) < max(map(ORDER.index, message)):
        last.update(message)
        return True
    return False


def to_messages(instructions: Any, items: Sequence[Placed]) -> Messages:
    """Return the chat of instructions, if there are any, and items. Raises Failure."""
    chat = Messages()
    if instructions is not None:
        chat.add("instructions", {"role": "system", "content": instructions})
    for placed in items:
        chat.add(placed.place, _message(placed.place, placed.item))
    return chat


def _message(place: str, item: Any) -> Json:
    if not isinstance(item, dict):
        raise Failure(400, f"'{place}' is not an object.", "input")
    kind = item.get("type", "message")
    if kind == "message" and isinstance(item.get("role"), str):
        return {"role": item["role"], "content": item.get("content")}
    if kind in CALLS:
        return {"role": "assistant", "tool_calls": [call_of(item, place)]}
    if kind in OUTPUTS:
        output = {"tool_call_id": item.get("call_id"), "content": item.get("output")}
        return {"role": "tool", **output}
    if kind == "reasoning":
        return {"role": "assistant", "reasoning_content": _thought(place, item)}
    what = "has no role" if kind == "message" else f"is of type {str(kind)[:40]!r}"
    message = f"'{place}' {what}: send messages, calls, their outputs and reasoning."
    raise Failure(400, message, "input")


def _thought(place: str, item: Mapping[str, Any]) -> str:
    parts = item.get("content") or item.get("summary") or []
    if not isinstance(parts, list):
        parts = [{"text": parts}]
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    thought = "\n".join(text for text in texts if isinstance(text, str))
    if item.get("encrypted_content") and not thought:
        raise Failure(400, f"'{place}.encrypted_content' cannot be read here.", "input")
    return thought

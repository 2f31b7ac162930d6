"""Normalization of clients' messages: text, reasoning, calls with ids, no empty fields."""

import json
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from dflash_trt.errors import RequestError
from dflash_trt.files import parse_json

Message = dict[str, Any]
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # field names that clients use
THOUGHT = THOUGHTS[0]
TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
FIX = 'Send objects such as {"role": "user", "content": "..."}.'
FIX_CALL = 'Send {"id": "..", "type": "function", "function": {"name": "..", "arguments": "{}"}}.'


def read_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return normalized messages; RequestError names an invalid part.

    Optional fields that are null or empty are dropped. Reasoning is in `reasoning_content`,
    arguments of calls are objects, `function_call` and the role `function` become calls and
    results.
    """
    if not messages:
        raise RequestError("messages is empty", "Send at least one message.")
    calls = _Calls()
    result = []
    for index, sent in enumerate(messages):
        place = f"messages[{index}]"
        if not isinstance(sent.get("role"), str):
            raise RequestError(f"{place} has no role", FIX)
        message = _normalize(place, sent)
        for number, call in enumerate(message.get("tool_calls", ())):
            call_place = f"{place}.tool_calls[{number}]"
            message["tool_calls"][number] = calls.add(_normalize_call(call_place, call))
        if message["role"] == "tool":
            calls.answer(message)
        if message["role"] == "user":
            calls.end_turn()
        result.append(message)
    return result


class _Calls:
    """Calls so far, by ids that no two of those without a result share.

    Clients choose ids, and some give the same one to several calls. Their results belong to them
    in order.
    """

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # of functions, by id
        self._waiting: OrderedDict[str, str] = OrderedDict()  # id sent, by the one given here
        self._same: defaultdict[str, deque[str]] = defaultdict(deque)  # ids given here, by id sent
        self._times: Counter[str] = Counter()  # that an id has been sent again

    def add(self, call: dict[str, Any]) -> dict[str, Any]:
        """Return the call with its id, or another where a call without a result has the same."""
        sent = call["id"] or f"call{len(self._names):05}"
        unique = sent
        while unique in self._waiting:
            self._times[sent] += 1
            unique = f"{sent}-{self._times[sent]}"
        self._names[unique] = call["function"]["name"]
        self._waiting[unique] = sent
        self._same[sent].append(unique)
        return {**call, "id": unique}

    def end_turn(self) -> None:
        """Leave ids to the next turn's calls, which may have the same ones."""
        self._same.clear()

    def answer(self, result: Message) -> None:
        """Give a result the id and the name of its call; without an id it is the oldest call's."""
        sent = result.get("tool_call_id")
        if sent is None and self._waiting:
            sent = next(iter(self._waiting.values()))
        if sent is None:
            return
        same = self._same.get(str(sent))
        unique = same.popleft() if same else str(sent)
        self._waiting.pop(unique, None)
        result["tool_call_id"] = unique
        if unique in self._names:
            result["name"] = self._names[unique]


def _normalize(place: str, sent: Mapping[str, Any]) -> Message:
    message = {name: value for name, value in sent.items() if value not in (None, "", [], {})}
    text, thought = _text_and_reasoning(f"{place}.content", sent.get("content"), sent["role"])
    for name in THOUGHTS:
        if isinstance(message.get(name), str):
            sent_thought = message.pop(name)
            thought = thought or sent_thought
    calls = message.get("tool_calls", [])
    if not isinstance(calls, list):
        raise RequestError(f"{place}.tool_calls is no list", FIX_CALL)
    function = message.pop("function_call", None)
    if function:
        calls = [*calls, {"function": function}]
    if calls:
        message["tool_calls"] = list(calls)
    if thought:
        message[THOUGHT] = thought
    if message["role"] == "function":
        message["role"] = "tool"
    refusal = message.pop("refusal", "")
    return {**message, "content": text or str(refusal)}


def _text_and_reasoning(place: str, content: Any, role: str) -> tuple[str, str]:
    if content is None or isinstance(content, str):
        return content or "", ""
    if not isinstance(content, list):
        if role == "tool":
            return json.dumps(content, ensure_ascii=False), ""
        raise RequestError(f"{place} is neither text nor a list of parts", FIX)
    texts = []
    thoughts = []
    for index, part in enumerate(content):
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        kind = str(part.get("type", "text")) if isinstance(part, dict) else str(part)
        if kind != "thinking" and kind not in TEXTS:
            what = f"{place}[{index}]: {kind[:40]} is not taken, only text"
            raise RequestError(what, 'Send {"type": "text", "text": ".."} or a string.')
        value = part.get(TEXTS.get(kind, kind))
        if not isinstance(value, str):
            raise RequestError(f"{place}[{index}]: {kind} has no text", "Send a string.")
        if kind == "thinking":
            thoughts.append(value)
        else:
            texts.append(value)
    return "\n".join(texts), "\n".join(thoughts)


def _normalize_call(place: str, call: Any) -> dict[str, Any]:
    """Return the call with its arguments as an object; an id that was not sent is ""."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{place} is no call of a function", FIX_CALL)
    arguments = function.get("arguments") or {}
    with suppress(ValueError):  # text in OpenAI's API; anything but an object stays as it is
        value = parse_json(arguments) if isinstance(arguments, str) else arguments
        if isinstance(value, dict):
            arguments = value
    function = {"name": function["name"], "arguments": arguments}
    return {"id": str(call.get("id") or ""), "type": "function", "function": function}


def without_nulls(tools: Sequence[Any]) -> list[Any]:
    return [
        {**tool, "function": {k: v for k, v in tool["function"].items() if v is not None}}
        for tool in tools
    ]


def with_defaults(tools: Sequence[Any]) -> list[Any]:
    """Add what some templates assume: descriptions, properties, one type per value."""
    empty = {"type": "object", "properties": {}, "required": []}
    result = []
    for tool in tools:
        function = {"description": "", "parameters": {}, **tool["function"]}
        function["parameters"] = {**empty, **_completed(function["parameters"])}
        result.append({**tool, "function": function})
    return result


def _completed(schema: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(schema)
    kinds = schema.get("type")
    if isinstance(kinds, list):
        result["type"] = next((kind for kind in kinds if kind != "null"), "null")
    properties = schema.get("properties")
    if isinstance(properties, dict):
        result["properties"] = {name: _described(value) for name, value in properties.items()}
    return result


def _described(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    return {"description": "", **_completed(schema)}

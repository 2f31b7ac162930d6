"""Normalization of clients' messages: text, reasoning, calls with ids, no empty fields."""

import json
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
    names: dict[str, str] = {}  # of functions, by call id
    waiting: list[str] = []  # ids of calls without results
    result = []
    for at, sent in enumerate(messages):
        place = f"messages[{at}]"
        if not isinstance(sent.get("role"), str):
            raise RequestError(f"{place} has no role", FIX)
        message = _normalize(place, sent)
        for number, call in enumerate(message.get("tool_calls", ())):
            call = _normalize_call(f"{place}.tool_calls[{number}]", call, f"call{len(names):05}")
            message["tool_calls"][number] = call
            names[call["id"]] = call["function"]["name"]
            waiting.append(call["id"])
        if message["role"] == "tool":
            if waiting and "tool_call_id" not in message:
                message["tool_call_id"] = waiting[0]
            answered = message.get("tool_call_id")
            waiting = [each for each in waiting if each != answered]
            message |= {"name": names[answered]} if answered in names else {}
        result.append(message)
    return result


def _normalize(place: str, sent: Mapping[str, Any]) -> Message:
    message = {name: value for name, value in sent.items() if value not in (None, "", [], {})}
    text, thought = _text_and_reasoning(f"{place}.content", sent.get("content"), sent["role"])
    thoughts = [message.pop(name) for name in THOUGHTS if isinstance(message.get(name), str)]
    calls, refusal = message.get("tool_calls", []), message.pop("refusal", "")
    if not isinstance(calls, list):
        raise RequestError(f"{place}.tool_calls is no list", FIX_CALL)
    old = message.pop("function_call", None)
    calls = [*calls, {"function": old}] if old else list(calls)
    message |= {"tool_calls": calls} if calls else {}
    thought = thought or next(iter(thoughts), "")
    message |= {THOUGHT: thought} if thought else {}
    message |= {"role": "tool"} if message["role"] == "function" else {}
    return {**message, "content": text or str(refusal)}


def _text_and_reasoning(place: str, content: Any, role: str) -> tuple[str, str]:
    if content is None or isinstance(content, str):
        return content or "", ""
    if not isinstance(content, list):
        if role == "tool":
            return json.dumps(content, ensure_ascii=False), ""
        raise RequestError(f"{place} is neither text nor a list of parts", FIX)
    texts, thoughts = list[str](), list[str]()
    for at, part in enumerate(content):
        part = {"type": "text", "text": part} if isinstance(part, str) else part
        kind = str(part.get("type", "text")) if isinstance(part, dict) else str(part)
        if kind != "thinking" and kind not in TEXTS:
            what = f"{place}[{at}]: {kind[:40]} is not taken, only text"
            raise RequestError(what, 'Send {"type": "text", "text": ".."} or a string.')
        value = part.get(TEXTS.get(kind, kind))
        if not isinstance(value, str):
            raise RequestError(f"{place}[{at}]: {kind} has no text", "Send a string.")
        (thoughts if kind == "thinking" else texts).append(value)
    return "\n".join(texts), "\n".join(thoughts)


def _normalize_call(place: str, call: Any, default_id: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{place} is no call of a function", FIX_CALL)
    arguments = function.get("arguments") or {}
    with suppress(ValueError):  # text in OpenAI's API; anything but an object stays as it is
        value = parse_json(arguments) if isinstance(arguments, str) else arguments
        arguments = value if isinstance(value, dict) else arguments
    function = {"name": function["name"], "arguments": arguments}
    return {"id": str(call.get("id") or default_id), "type": "function", "function": function}


def without_nulls(tools: Sequence[Any]) -> list[Any]:
    return [
        {**tool, "function": {k: v for k, v in tool["function"].items() if v is not None}}
        for tool in tools
    ]


def with_defaults(tools: Sequence[Any]) -> list[Any]:
    """Add what some templates assume: descriptions, properties, one type per value."""
    empty = {"type": "object", "properties": {}, "required": []}
    functions = [{"description": "", "parameters": {}, **tool["function"]} for tool in tools]
    return [
        {**tool, "function": {**each, "parameters": {**empty, **_completed(each["parameters"])}}}
        for tool, each in zip(tools, functions, strict=True)
    ]


def _completed(schema: Mapping[str, Any]) -> dict[str, Any]:
    result, kinds = dict(schema), schema.get("type")
    if isinstance(kinds, list):
        result["type"] = next((kind for kind in kinds if kind != "null"), "null")
    if isinstance(properties := schema.get("properties"), dict):
        result["properties"] = {
            name: {"description": "", **_completed(value)} if isinstance(value, dict) else value
            for name, value in properties.items()
        }
    return result

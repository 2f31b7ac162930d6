"""Chats with tools in the form that a model's template wants them."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from dflash_trt.chat.dialect import Dialect
from dflash_trt.files import parse_json

Message = dict[str, Any]
# as Qwen2.5's template has it, whose calls are those of Hermes
TOLD = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def to_template(
    dialect: Dialect, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]
) -> tuple[list[Message], list[Any] | None]:
    """Messages and tools for a template.

    One that shows no tools has them in a system message, one that writes no calls has these in the
    text: both in Hermes' words.
    """
    told: list[Message] = []
    for message in messages:
        calls = message.get("tool_calls")
        if message["role"] == "assistant" and isinstance(calls, list) and calls:
            told.append(_calling(dialect, message, calls))
        elif message["role"] == "tool" and not dialect.writes_calls:
            _add_result(told, message)
        else:
            told.append(dict(message))
    if dialect.one_call:
        told = _in_turn(told)
    if tools and not dialect.shows_tools:
        _tell(dialect, told, TOLD.format(tools="\n".join(map(_json, tools))))
        return told, None
    return told, list(tools) or None


def _calling(dialect: Dialect, message: Mapping[str, Any], calls: list[Any]) -> Message:
    functions = [dict(each["function"]) for each in calls if _is_call(each)]
    for function in functions:
        function["arguments"] = _arguments(
            function.get("arguments"), as_text=dialect.text_arguments
        )
    if dialect.writes_calls:
        made = [
            {**call, "function": function}
            for call, function in zip(filter(_is_call, calls), functions, strict=True)
        ]
        return {**message, "content": message.get("content") or "", "tool_calls": made}
    written = [
        "<tool_call>\n"
        + _json({"name": function.get("name"), "arguments": function["arguments"]})
        + "\n</tool_call>"
        for function in functions
    ]
    said = [message["content"]] if message.get("content") else []
    return {"role": "assistant", "content": "\n".join([*said, *written])}


def _is_call(call: Any) -> bool:
    return isinstance(call, dict) and isinstance(call.get("function"), dict)


def _arguments(arguments: Any, *, as_text: bool) -> Any:
    """OpenAI's API has them as text; what is no object stays as it is."""
    if not isinstance(arguments, str):
        return _json(arguments or {}) if as_text else arguments or {}
    with suppress(ValueError):
        found = parse_json(arguments or "{}")
        return found if isinstance(found, dict) and not as_text else arguments
    return arguments


def _add_result(told: list[Message], message: Mapping[str, Any]) -> None:
    """What a tool gave, said by the user; that of several calls in one message."""
    text = f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"
    last = told[-1] if told else {}
    if last.get("role") == "user" and str(last["content"]).endswith("</tool_response>"):
        told[-1] = {**last, "content": f"{last['content']}\n{text}"}
    else:
        told.append({"role": "user", "content": text})


def _in_turn(told: list[Message]) -> list[Message]:
    """A message of several calls as one message a call, each before what it gave."""
    found: list[Message] = []
    at = 0
    while at < len(told):
        message, at = told[at], at + 1
        calls = message.get("tool_calls")
        if not isinstance(calls, list) or len(calls) < 2:
            found.append(message)
            continue
        given = []
        while at < len(told) and told[at]["role"] == "tool":
            given.append(told[at])
            at += 1
        for number, call in enumerate(calls):
            content = message["content"] if not number else ""
            found.append({**message, "content": content, "tool_calls": [call]})
            found += [each for each in given if each.get("tool_call_id") == call.get("id")]
        known = [call.get("id") for call in calls]
        found += [each for each in given if each.get("tool_call_id") not in known]
    return found


def _tell(dialect: Dialect, told: list[Message], text: str) -> None:
    """In the system message, or in front of what the first user says."""
    role = "system" if dialect.system else "user"
    first = next((at for at, message in enumerate(told) if message["role"] == role), None)
    if first is None:
        told.insert(0, {"role": role, "content": text})
    else:
        content = told[first].get("content") or ""
        both = (content, text) if dialect.system else (text, content)
        told[first] = {**told[first], "content": "\n\n".join(filter(None, map(str, both)))}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)

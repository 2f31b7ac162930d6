"""Messages as clients send them, in one form: text, thoughts, calls with ids, nothing empty."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from dflash_trt.chat.formats.reader import ID_CHARACTERS, ID_LENGTH
from dflash_trt.errors import RequestError
from dflash_trt.files import parse_json

Message = dict[str, Any]
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # what clients call them
THOUGHT = THOUGHTS[0]
SHORT = "9 letters and digits"  # ids of calls, as Mistral's templates want them
NAMED = "functions.NAME:NUMBER"  # as Kimi's do, which show no other name of the function
TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
FIX = 'Send objects such as {"role": "user", "content": "..."}.'
FIX_CALL = 'Send {"id": "..", "type": "function", "function": {"name": "..", "arguments": "{}"}}.'


def read_messages(
    messages: Sequence[Mapping[str, Any]], *, text_arguments: bool = False, ids: str = ""
) -> list[Message]:
    """Return the messages in one form; RequestError names the part that cannot be read.

    Optional fields that are null or empty are left out. Thoughts are in `reasoning_content`,
    `function_call` and the role `function` become calls and results of tools.
    text_arguments: of calls, for the template; else they are objects.
    ids: the form that calls have them in, `SHORT` or `NAMED`; "": as they are.
    """
    if not messages:
        raise RequestError("messages is empty", "Send at least one message.")
    names: dict[str, str] = {}  # of functions, by the id of the call
    waiting: list[str] = []  # ids of calls without a result
    result = []
    for at, sent in enumerate(messages):
        place = f"messages[{at}]"
        if not isinstance(sent, Mapping) or not isinstance(sent.get("role"), str):
            raise RequestError(f"{place} has no role", FIX)
        message = _one_form(place, sent)
        if calls := message.get("tool_calls"):
            made = [
                _call(f"{place}.tool_calls[{number}]", call, len(names) + number, text_arguments)
                for number, call in enumerate(calls)
            ]
            for call in made:
                names[call["id"]] = call["function"]["name"]
            waiting = [call["id"] for call in made]
            message["tool_calls"] = made
        elif message["role"] == "tool":
            answered = message.get("tool_call_id")
            if answered is None and waiting:
                same = [each for each in waiting if names[each] == message.get("name")]
                answered = message["tool_call_id"] = (same or waiting)[0]
            waiting = [each for each in waiting if each != answered]
            if answered in names:
                message.setdefault("name", names[answered])
        result.append(message)
    return with_ids(result, ids)


def _one_form(place: str, sent: Mapping[str, Any]) -> Message:
    message = {name: value for name, value in sent.items() if value not in (None, "", [], {})}
    text, thoughts = _text(f"{place}.content", sent.get("content"), sent["role"])
    thoughts += [each for name in THOUGHTS if isinstance(each := message.get(name), str)]
    for name in THOUGHTS:
        message.pop(name, None)
    refusal = message.pop("refusal", None)
    if isinstance(refusal, str) and not text:
        text = refusal
    if thoughts:
        message[THOUGHT] = thoughts[0]
    if (call := message.pop("function_call", None)) is not None:
        message["tool_calls"] = [*message.get("tool_calls", []), {"function": call}]
    if message["role"] == "function":
        message["role"] = "tool"
    if not isinstance(message.get("tool_calls", []), list):
        raise RequestError(f"{place}.tool_calls is no list", FIX_CALL)
    return {**message, "content": text}


def _text(place: str, content: Any, role: str) -> tuple[str, list[str]]:
    """Return the text of a message's content, its parts a line each, and thoughts in it."""
    if content is None or isinstance(content, str):
        return content or "", []
    if not isinstance(content, list):
        if role == "tool":
            return json.dumps(content, ensure_ascii=False), []
        raise RequestError(f"{place} is neither text nor a list of parts", FIX)
    texts, thoughts = list[str](), list[str]()
    for at, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type", "text") if isinstance(part, dict) else None
        if kind in ("thinking", "reasoning") and isinstance(part.get("thinking"), str):
            thoughts.append(part["thinking"])
            continue
        field = TEXTS.get(kind) if isinstance(kind, str) else None
        value = part.get(field) if field else None
        if not isinstance(value, str):
            what = f"{str(kind)[:40]} is not taken, only text" if field is None else "has no text"
            raise RequestError(
                f"{place}[{at}]: {what}", 'Send {"type": "text", "text": ".."} or a string.'
            )
        texts.append(value)
    return "\n".join(texts), thoughts


def _call(place: str, call: Any, number: int, text_arguments: bool) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{place} is no call of a function", FIX_CALL)
    arguments = _arguments(function.get("arguments"), as_text=text_arguments)
    given = {} if function is call else call
    return {
        **given,
        "id": str(call.get("id") or f"call{number:05}"),
        "type": "function",
        "function": {**function, "arguments": arguments},
    }


def _arguments(arguments: Any, *, as_text: bool) -> Any:
    """OpenAI's API has them as text; what is no object stays as it is."""
    if not isinstance(arguments, str):
        return json.dumps(arguments or {}, ensure_ascii=False) if as_text else arguments or {}
    with suppress(ValueError):
        value = parse_json(arguments or "{}")
        return value if isinstance(value, dict) and not as_text else arguments or "{}"
    return arguments


def with_ids(messages: list[Message], form: str) -> list[Message]:
    """Return the messages with the ids of calls and results in that form; "": as they are."""
    known: dict[str, str] = {}
    for message in messages if form else ():
        for call in message.get("tool_calls", ()):
            name = call["function"]["name"]
            made = _short(call["id"]) if form == SHORT else f"functions.{name}:{len(known)}"
            call["id"] = known.setdefault(call["id"], made)
        if isinstance(sent := message.get("tool_call_id"), str):
            message["tool_call_id"] = known.get(sent) or _short(sent)
    return messages


def _short(name: str) -> str:
    if len(name) == ID_LENGTH and set(name) <= set(ID_CHARACTERS):
        return name
    digest = hashlib.sha256(name.encode()).digest()[:ID_LENGTH]
    return "".join(ID_CHARACTERS[byte % len(ID_CHARACTERS)] for byte in digest)


def without_nulls(tools: Sequence[Any]) -> list[Any]:
    """Return the tools without optional fields that are null."""
    return [
        {**tool, "function": {k: v for k, v in tool["function"].items() if v is not None}}
        for tool in tools
    ]


def completed(tools: Sequence[Any]) -> list[Any]:
    """Return the tools with what some templates take for granted.

    These are descriptions, parameters with properties, and one type of a value.
    """
    return [
        {
            **tool,
            "function": {
                "description": "",
                **tool["function"],
                "parameters": {
                    **{"type": "object", "properties": {}, "required": []},
                    **_completed(tool["function"].get("parameters", {})),
                },
            },
        }
        for tool in tools
    ]


def _completed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    result = dict(schema)
    if isinstance(kinds := schema.get("type"), list):
        result["type"] = next((kind for kind in kinds if kind != "null"), "null")
    if isinstance(properties := schema.get("properties"), dict):
        result["properties"] = {
            name: {"description": "", **_completed(value)} if isinstance(value, dict) else value
            for name, value in properties.items()
        }
    if "items" in schema:
        result["items"] = _completed(schema["items"])
    return result

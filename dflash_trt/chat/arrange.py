"""Rewriting a chat's messages so that a template shows all of them.

A template refuses some chats and silently leaves out parts of others. So each chat is tried as a
specimen first: the same roles and calls, with marks as contents. It is kept if all marks appear in
the output; otherwise the first rewrites below that make them appear are used.
"""

import json
import re
from collections import deque
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import combinations
from typing import Any

from dflash_trt.chat.messages import THOUGHT, Message
from dflash_trt.errors import RequestError

MARK = re.compile(r"zq(\d+)(?:[nv]\d+)?z")  # with the message's number
MOST_REWRITES = 3
INSTRUCTIONS = ("system", "developer")
Rewrite = Callable[[list[Message]], list[Message]]
# as in Qwen2.5's template, which has Hermes' calls
PREAMBLE = """# Tools

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


def specimen_of(messages: Sequence[Message]) -> list[Message]:
    """Return messages that a template treats alike, with marks as texts and calls."""
    result, marks = list[Message](), dict[str, str]()  # of functions, by call id
    for at, message in enumerate(messages):
        each: Message = {"role": message["role"], "content": f"zq{at}z" * bool(message["content"])}
        each |= {THOUGHT: "thought"} if THOUGHT in message else {}
        if "tool_call_id" in message:
            name = marks.get(str(message["tool_call_id"]), "unknown")
            each |= {"tool_call_id": f"id-of-{name}", "name": name}
        for number, call in enumerate(message.get("tool_calls", ())):
            marks[call["id"]] = f"zq{at}n{number}z"
            each.setdefault("tool_calls", []).append(specimen_call(at, number))
        result.append(each)
    return result


def specimen_call(at: int, number: int = 0) -> dict[str, Any]:
    name, arguments = f"zq{at}n{number}z", {"probe_key": f"zq{at}v{number}z"}
    function = {"name": name, "arguments": arguments}
    return {"id": f"id-of-{name}", "type": "function", "function": function}


def find_rewrites(
    specimen: list[Message], render: Callable[[list[Message]], str], rewrites: Sequence[Rewrite]
) -> tuple[tuple[Rewrite, ...], list[int]]:
    """Return the fewest that show the most, and messages not shown; none if all are refused."""
    marks = {found[0] for found in MARK.finditer(json.dumps(specimen))}
    best, least, tried = tuple[Rewrite, ...](), set[str](), list[list[Message]]()
    for count in range(MOST_REWRITES + 1):
        for chosen in combinations(rewrites, count):
            arranged = rewritten(specimen, chosen)
            if arranged in tried:
                continue
            tried.append(arranged)
            try:
                text = render(arranged)
            except RequestError:
                continue
            lost = marks - {found[0] for found in MARK.finditer(text)}
            if not lost:
                return chosen, []
            if not least or len(lost) < len(least):
                best, least = chosen, lost
    return best, sorted({int(MARK.findall(mark)[0]) for mark in least})


def rewritten(messages: list[Message], rewrites: Sequence[Rewrite]) -> list[Message]:
    return reduce(lambda result, rewrite: rewrite(result), rewrites, messages)


def developer_as_system(messages: list[Message]) -> list[Message]:
    return [
        {**each, "role": "system"} if each["role"] == "developer" else each for each in messages
    ]


def instructions_in_one(messages: list[Message]) -> list[Message]:
    texts = [each["content"] for each in messages if each["role"] in INSTRUCTIONS]
    rest = [each for each in messages if each["role"] not in INSTRUCTIONS]
    return [_with_texts({"role": "system"}, *texts), *rest] if texts else messages


def system_in_user(messages: list[Message]) -> list[Message]:
    first, *rest = instructions_in_one(messages)
    if first["role"] != "system":
        return messages
    at = next((at for at, each in enumerate(rest) if each["role"] == "user"), None)
    if at is None:
        return [{**first, "role": "user"}, *rest]
    rest[at] = _with_texts(rest[at], first["content"], rest[at]["content"])
    return rest


def calls_in_words(messages: list[Message]) -> list[Message]:
    """Write calls as text in Hermes' format, and tool results as user messages."""
    result: list[Message] = []
    for message in messages:
        calls = [
            f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
            for call in message.get("tool_calls", ())
        ]
        text = "\n".join(filter(None, (message["content"], *calls)))
        if message["role"] != "tool":
            rest = {name: value for name, value in message.items() if name != "tool_calls"}
            result.append({**rest, "content": text})
            continue
        text = f"<tool_response>\n{text}\n</tool_response>"
        last = result[-1] if result else {}
        if last.get("role") == "user" and last["content"].endswith("</tool_response>"):
            text = f"{result.pop()['content']}\n{text}"
        result.append({"role": "user", "content": text})
    return result


def one_call_a_message(messages: list[Message]) -> list[Message]:
    """Split calls into one message each, followed by its result; text goes first."""
    result, rest = list[Message](), deque(messages)
    while rest:
        message = rest.popleft()
        calls, given = message.get("tool_calls", []), list[Message]()
        while calls and rest and rest[0]["role"] == "tool":
            given.append(rest.popleft())
        if calls and message["content"]:
            result.append({"role": message["role"], "content": message["content"]})
        for call in calls:
            result.append({**message, "content": "", "tool_calls": [call]})
            message = {"role": message["role"]}  # only the first call keeps the reasoning
            result += [each for each in given if each.get("tool_call_id") == call["id"]]
        result += [each for each in given if each not in result] if calls else [message]
    return result


def neighbors_joined(messages: list[Message]) -> list[Message]:
    result: list[Message] = []
    for each in messages:
        last = result[-1] if result else {}
        if each["role"] == last.get("role") != "tool" and "tool_calls" not in last:
            each = {**result.pop(), **_with_texts(each, last["content"], each["content"])}
        result.append(each)
    return result


# in the order of application
REWRITES: tuple[Rewrite, ...] = (
    calls_in_words,
    one_call_a_message,
    developer_as_system,
    instructions_in_one,
    system_in_user,
    neighbors_joined,
)


def with_tools(messages: list[Message], tools: Sequence[Any]) -> list[Message]:
    text = PREAMBLE.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if messages[0]["role"] in INSTRUCTIONS:
        return [_with_texts(messages[0], messages[0]["content"], text), *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _with_texts(message: Message, *texts: str) -> Message:
    return {**message, "content": "\n\n".join(filter(None, texts))}

"""How the messages of a chat are arranged so that a template shows all of them.

A template refuses some chats, and of others it leaves out a part without a word. A chat is tried
as a specimen first: the same roles and calls, with marks in place of what they say. It stays as it
is where all marks come out, else the first arrangement is taken of which they do.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from dflash_trt.chat.messages import THOUGHT, Message
from dflash_trt.errors import RequestError

MARK = re.compile(r"zq\d+z")
NAME, VALUE = 10**6, 2 * 10**6  # the first marks of calls' names and arguments
INSTRUCTIONS = ("system", "developer")
Try = Callable[[list[Message]], str]  # renders messages
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


class Shape(NamedTuple):
    """What a specimen has of a message."""

    role: str
    says: bool
    calls: int
    answers: int  # which of the chat's calls a tool's result is of; -1: none
    thinks: bool


class Arrangement(NamedTuple):
    """How far each part is from the chat as it was sent: 0 is as it was."""

    calls: int = 0
    instructions: int = 0
    turns: int = 0

    def __str__(self) -> str:
        ways = zip(WAYS, self, strict=True)
        return ", ".join(way[number] for way, number in ways if number) or "as sent"


AS_SENT = Arrangement()
WAYS = (
    (
        "",
        "one call a message",
        "calls after a message of the text beside them",
        "one call a message, after one of the text beside it",
        "calls and results in words",
    ),
    (
        "",
        "as a system message",
        "in one system message",
        "in the first message of the user",
    ),
    ("", "neighbors of one role joined"),
)


def shapes_of(messages: Sequence[Message]) -> tuple[Shape, ...]:
    """Return what decides how a template takes the messages."""
    ids: dict[str, int] = {}
    shapes = []
    for message in messages:
        calls = message.get("tool_calls", ())
        ids |= {call["id"]: len(ids) + number for number, call in enumerate(calls)}
        answers = ids.get(str(message.get("tool_call_id")), -1)
        says, thinks = bool(message["content"]), THOUGHT in message
        shapes.append(Shape(message["role"], says, len(calls), answers, thinks))
    return tuple(shapes)


def specimen(shapes: Sequence[Shape], text_arguments: bool) -> list[Message]:
    """Return messages of these shapes; the mark of a text is the message's number."""
    messages, calls = list[Message](), 0
    for at, shape in enumerate(shapes):
        message: Message = {"role": shape.role, "content": f"zq{at}z" if shape.says else ""}
        if shape.thinks:
            message[THOUGHT] = "thought"
        if shape.role == "tool" and shape.answers >= 0:
            name = f"zq{NAME + shape.answers}z"
            message |= {"tool_call_id": f"call-{shape.answers:05}", "name": name}
        if shape.calls:
            message["tool_calls"] = [
                specimen_call(number, text_arguments)
                for number in range(calls, calls + shape.calls)
            ]
            calls += shape.calls
        messages.append(message)
    return messages


def specimen_call(number: int, text_arguments: bool) -> dict[str, Any]:
    """Return a call with a mark in its name and one in its arguments."""
    arguments: Any = {"probe_key": f"zq{VALUE + number}z"}
    arguments = json.dumps(arguments) if text_arguments else arguments
    function = {"name": f"zq{NAME + number}z", "arguments": arguments}
    return {"id": f"call-{number:05}", "type": "function", "function": function}


def marks_of(shapes: Sequence[Shape]) -> set[str]:
    calls = range(sum(shape.calls for shape in shapes))
    texts = {f"zq{at}z" for at, shape in enumerate(shapes) if shape.says}
    return texts | {f"zq{first + number}z" for number in calls for first in (NAME, VALUE)}


def find_arrangement(
    shapes: Sequence[Shape], render: Try, *, text_arguments: bool, in_words: bool
) -> tuple[Arrangement, list[int]]:
    """Return the first arrangement of which all comes out, and the messages that no one shows.

    As it was sent where the template refuses every one.
    in_words: calls may be written into the text.
    """
    messages, marks = specimen(shapes, text_arguments), marks_of(shapes)
    best: tuple[Arrangement, set[str]] | None = None
    for arrangement in arrangements(shapes, in_words):
        try:
            text = render(arranged(messages, arrangement))
        except RequestError:
            continue
        lost = marks - set(MARK.findall(text))
        if not lost:
            return arrangement, []
        if best is None or len(lost) < len(best[1]):
            best = arrangement, lost
    if best is None:
        return AS_SENT, []
    numbers = sorted(int(mark[2:-1]) for mark in best[1])
    callers = [at for at, shape in enumerate(shapes) for _ in range(shape.calls)]
    return best[0], sorted({n if n < NAME else callers[n % NAME] for n in numbers})


def arrangements(shapes: Sequence[Shape], in_words: bool) -> Iterator[Arrangement]:
    """Those that change something of such messages, the nearest first."""
    calls = {0} | ({1} if any(shape.calls > 1 for shape in shapes) else set())
    if any(shape.calls and shape.says for shape in shapes):
        calls |= {2} | {each + 2 for each in calls if each}
    if in_words and any(shape.calls or shape.role == "tool" for shape in shapes):
        calls.add(4)
    roles = [shape.role for shape in shapes]
    instructions = [0, *([1] if "developer" in roles else [])]
    if any(role in INSTRUCTIONS for role in roles):
        instructions += [2, 3]
    found = product(sorted(calls), instructions, (0, 1))
    return map(Arrangement._make, sorted(found, key=lambda each: (sum(each), each)))


def arranged(messages: Sequence[Message], arrangement: Arrangement) -> list[Message]:
    """Return the messages so."""
    result = [dict(message) for message in messages]
    if arrangement.calls == 4:
        result = _calls_in_words(result)
    elif arrangement.calls:
        result = _calls_apart(result, arrangement.calls & 1 > 0, arrangement.calls & 2 > 0)
    if arrangement.instructions:
        result = _instructed(result, arrangement.instructions)
    return _joined(result) if arrangement.turns else result


def with_tools(messages: list[Message], tools: Sequence[Any]) -> list[Message]:
    """Return the messages with tools at the end of the system message, in Hermes' words."""
    text = TOLD.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if messages and messages[0]["role"] in INSTRUCTIONS:
        return [_with(messages[0], messages[0]["content"], text), *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _with(message: Message, *texts: str) -> Message:
    return {**message, "content": "\n\n".join(filter(None, texts))}


def _instructed(messages: list[Message], way: int) -> list[Message]:
    if way == 1:
        return [
            {**each, "role": "system"} if each["role"] == "developer" else each for each in messages
        ]
    rest = [each for each in messages if each["role"] not in INSTRUCTIONS]
    texts = [each["content"] for each in messages if each["role"] in INSTRUCTIONS]
    if way == 2:
        return [_with({"role": "system"}, *texts), *rest]
    users = [at for at, each in enumerate(rest) if each["role"] == "user"]
    if not users:
        return [_with({"role": "user"}, *texts), *rest]
    rest[users[0]] = _with(rest[users[0]], *texts, rest[users[0]]["content"])
    return rest


def _joined(messages: list[Message]) -> list[Message]:
    result: list[Message] = []
    for each in messages:
        last = result[-1] if result else {}
        if each["role"] != last.get("role") or each["role"] == "tool" or "tool_calls" in last:
            result.append(each)
            continue
        result[-1] = {**last, **_with(each, last["content"], each["content"])}
    return result


def _calls_apart(messages: list[Message], one: bool, text_first: bool) -> list[Message]:
    """one: a message a call, each before its result; text_first: their text goes before them."""
    result: list[Message] = []
    at = 0
    while at < len(messages):
        message, at = messages[at], at + 1
        calls = message.get("tool_calls", [])
        if text_first and calls and message["content"]:
            result.append({"role": message["role"], "content": message["content"]})
            message = {**message, "content": ""}
        if not one or len(calls) < 2:
            result.append(message)
            continue
        given = []
        while at < len(messages) and messages[at]["role"] == "tool":
            given.append(messages[at])
            at += 1
        for number, call in enumerate(calls):
            rest = {} if not number else {"content": ""}
            result.append({**message, **rest, "tool_calls": [call]})
            if number:
                result[-1].pop(THOUGHT, None)
            result += [each for each in given if each.get("tool_call_id") == call["id"]]
        known = [call["id"] for call in calls]
        result += [each for each in given if each.get("tool_call_id") not in known]
    return result


def _calls_in_words(messages: list[Message]) -> list[Message]:
    """In Hermes' words; what tools gave is said by the user, of several calls in one message."""
    result: list[Message] = []
    for message in messages:
        if calls := message.get("tool_calls"):
            written = (_written(call["function"]) for call in calls)
            text = "\n".join(filter(None, (message["content"], *written)))
            rest = {name: value for name, value in message.items() if name != "tool_calls"}
            result.append({**rest, "content": text})
        elif message["role"] != "tool":
            result.append(message)
        else:
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            last = result[-1] if result else {}
            if last.get("role") == "user" and last["content"].endswith("</tool_response>"):
                result[-1] = {**last, "content": f"{last['content']}\n{text}"}
            else:
                result.append({"role": "user", "content": text})
    return result


def _written(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"

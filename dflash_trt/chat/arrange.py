"""Rewriting a chat's messages so that a template shows all of them.

A template refuses some chats and silently leaves out parts of others. So each chat is tried as a
specimen first: the same roles and calls, with marks as contents. It is kept if all marks appear in
the output; otherwise the first rewrites below that make them appear are used. Where nothing shows
all, what shows most goes, and only an instruction or a question that would be lost is refused.
"""

import json
import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import combinations
from typing import Any

from dflash_trt.chat.messages import THOUGHT, Message
from dflash_trt.errors import RequestError

MARK = re.compile(r"zq(\d+)(?:[nv]\d+)?z")  # with the message's number
TEXT_MARK = re.compile(r"zq\d+z")  # of a message's text; others are in its calls
MOST_REWRITES = 3
REPLIES = ("assistant", "tool")  # roles whose messages may be left out where nothing shows them
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


@dataclass(frozen=True, order=True)
class Loss:
    """How much of a chat a template leaves out; smaller is better."""

    instructions_and_questions: int  # and other roles that a client made up
    calls_and_results: int
    texts: int  # of the assistant

    @property
    def must_be_refused(self) -> bool:
        """Return whether the answer would be to another question than the client's."""
        return self.instructions_and_questions > 0


NOTHING_LOST = Loss(0, 0, 0)


@dataclass(frozen=True)
class Arrangement:
    """The rewrites that show most of a chat, and the numbers of the messages that must not go."""

    rewrites: tuple[Rewrite, ...] = ()
    refused: tuple[int, ...] = ()  # messages that would be lost


def find_rewrites(
    specimen: list[Message], render: Callable[[list[Message]], str], rewrites: Sequence[Rewrite]
) -> Arrangement:
    """Return the fewest rewrites that show the most; none if the template refuses all."""
    marks = _marks(json.dumps(specimen))
    best, least = Arrangement(), None
    tried = list[list[Message]]()
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
            lost = marks - _marks(text)
            loss = _loss(specimen, lost)
            if least is None or loss < least:
                best, least = Arrangement(chosen, _refused(specimen, lost)), loss
            if loss == NOTHING_LOST:
                return best
    return best


def _marks(text: str) -> set[str]:
    return {match[0] for match in MARK.finditer(text)}


def _message_of(mark: str) -> int:
    return int(MARK.findall(mark)[0])


def _loss(specimen: Sequence[Message], lost: Iterable[str]) -> Loss:
    instructions, calls, texts = 0, 0, 0
    for mark in lost:
        role = specimen[_message_of(mark)]["role"]
        if role not in REPLIES:
            instructions += 1
        elif role == "tool" or not TEXT_MARK.fullmatch(mark):
            calls += 1
        else:
            texts += 1
    return Loss(instructions, calls, texts)


def _refused(specimen: Sequence[Message], lost: Iterable[str]) -> tuple[int, ...]:
    numbers = {_message_of(mark) for mark in lost}
    return tuple(sorted(n for n in numbers if specimen[n]["role"] not in REPLIES))


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
    """Write calls as text in Hermes' format, and tool results in a row as one user message."""
    result = list[Message]()
    responses = list[str]()  # of tools, not yet in a message

    def end_responses() -> None:
        if responses:
            result.append({"role": "user", "content": "\n".join(responses)})
            responses.clear()

    for message in messages:
        calls = [
            f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
            for call in message.get("tool_calls", ())
        ]
        text = "\n".join(filter(None, (message["content"], *calls)))
        if message["role"] == "tool":
            responses.append(f"<tool_response>\n{text}\n</tool_response>")
            continue
        end_responses()
        rest = {name: value for name, value in message.items() if name != "tool_calls"}
        result.append({**rest, "content": text})
    end_responses()
    return result


def one_call_a_message(messages: list[Message]) -> list[Message]:
    """Split calls into one message each, followed by its result; text goes first."""
    result, rest = list[Message](), deque(messages)
    while rest:
        message = rest.popleft()
        calls = message.get("tool_calls", [])
        if not calls:
            result.append(message)
            continue
        results = list[Message]()
        while rest and rest[0]["role"] == "tool":
            results.append(rest.popleft())
        if message["content"]:
            result.append({"role": message["role"], "content": message["content"]})
        result += _one_by_one(message, calls, results)
    return result


def _one_by_one(
    message: Message, calls: Sequence[Mapping[str, Any]], results: Sequence[Message]
) -> list[Message]:
    """Return each call in a message of its own before its results; only the first has reasoning."""
    by_id = defaultdict[object, list[Message]](list)
    for each_result in results:
        by_id[each_result.get("tool_call_id")].append(each_result)
    arranged = list[Message]()
    for call in calls:
        arranged.append({**message, "content": "", "tool_calls": [call]})
        message = {"role": message["role"]}
        arranged += by_id.pop(call["id"], [])
    for of_no_call in by_id.values():
        arranged += of_no_call
    return arranged


def neighbors_joined(messages: list[Message]) -> list[Message]:
    """Join messages of one role in a row, but not results, nor anything after calls."""
    groups = list[list[Message]]()
    for message in messages:
        last = groups[-1][-1] if groups else None
        joins = last is not None and last["role"] == message["role"] != "tool"
        if joins and last is not None and "tool_calls" not in last:
            groups[-1].append(message)
        else:
            groups.append([message])
    return [_joined(group) for group in groups]


def _joined(group: Sequence[Message]) -> Message:
    fields: Message = {}
    for message in group:
        fields |= message
    return _with_texts(fields, *(message["content"] for message in group))


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

"""Rewrites of a chat for templates that do not take it as it is."""

import json
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

from dflash_trt.chat.messages import Message

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


def rewritten(messages: list[Message], rewrites: Sequence[Rewrite]) -> list[Message]:
    return reduce(lambda result, rewrite: rewrite(result), rewrites, messages)


def developer_as_system(messages: list[Message]) -> list[Message]:
    result = []
    for message in messages:
        role = "system" if message["role"] == "developer" else message["role"]
        result.append({**message, "role": role})
    return result


def instructions_in_one(messages: list[Message]) -> list[Message]:
    texts = [message["content"] for message in messages if message["role"] in INSTRUCTIONS]
    if not texts:
        return messages
    rest = [message for message in messages if message["role"] not in INSTRUCTIONS]
    return [_with_texts({"role": "system"}, *texts), *rest]


def system_in_user(messages: list[Message]) -> list[Message]:
    first, *rest = instructions_in_one(messages)
    if first["role"] != "system":
        return messages
    for index, message in enumerate(rest):
        if message["role"] == "user":
            rest[index] = _with_texts(message, first["content"], message["content"])
            return rest
    return [{**first, "role": "user"}, *rest]


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
    result = list[Message]()
    rest = deque(messages)
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
    for result in results:
        by_id[result.get("tool_call_id")].append(result)
    arranged = list[Message]()
    for call in calls:
        arranged.append({**message, "content": "", "tool_calls": [call]})
        message = {"role": message["role"]}
        arranged += by_id.pop(call["id"], [])
    for of_no_call in by_id.values():
        arranged += of_no_call
    return arranged


def results_answered(messages: list[Message]) -> list[Message]:
    """Put an empty answer between a result and a user's message."""
    result = list[Message]()
    for message in messages:
        if result and result[-1]["role"] == "tool" and message["role"] == "user":
            result.append({"role": "assistant", "content": ""})
        result.append(message)
    return result


def neighbors_joined(messages: list[Message]) -> list[Message]:
    """Join messages of one role in a row, but not results, nor anything after calls."""
    groups = list[list[Message]]()
    for message in messages:
        if groups and _may_be_joined(groups[-1][-1], message):
            groups[-1].append(message)
        else:
            groups.append([message])
    return [_joined(group) for group in groups]


def _may_be_joined(last: Message, message: Message) -> bool:
    return last["role"] == message["role"] != "tool" and "tool_calls" not in last


def _joined(group: Sequence[Message]) -> Message:
    fields: Message = {}
    for message in group:
        fields |= message
    return _with_texts(fields, *(message["content"] for message in group))


def with_tools(messages: list[Message], tools: Sequence[Any]) -> list[Message]:
    text = PREAMBLE.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if messages[0]["role"] in INSTRUCTIONS:
        return [_with_texts(messages[0], messages[0]["content"], text), *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _with_texts(message: Message, *texts: str) -> Message:
    return {**message, "content": "\n\n".join(filter(None, texts))}


# in the order of application
REWRITES: tuple[Rewrite, ...] = (
    calls_in_words,
    one_call_a_message,
    developer_as_system,
    instructions_in_one,
    system_in_user,
    results_answered,
    neighbors_joined,
)

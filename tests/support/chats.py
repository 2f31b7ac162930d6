"""Chats of ordinary kinds, each text in them a word of its own."""

import json
import re
from typing import Any

Chat = list[dict[str, Any]]
WORD = re.compile(r"(?:system|developer|user|answer|beside|result|thought|value)-\d")


def says(role: str, word: str, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": word, **fields}


def call(number: int) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": json.dumps({"city": f"value-{number}"})}
    return {"id": f"call_0123456789_{number}", "type": "function", "function": function}


def result(number: int) -> dict[str, Any]:
    return says("tool", f"result-{number}", tool_call_id=call(number)["id"])


TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "strict": None,
    },
}
USER, AGAIN, ANSWER = says("user", "user-1"), says("user", "user-2"), says("assistant", "answer-1")
SYSTEM, DEVELOPER = says("system", "system-1"), says("developer", "developer-1")
CALL = {"role": "assistant", "content": None, "tool_calls": [call(1)]}
CALLS = {**CALL, "tool_calls": [call(1), call(2)]}
TEXT = {"type": "text", "cache_control": {"type": "ephemeral"}}
# by their kind; those with calls are sent with TOOL
CHATS: dict[str, Chat] = {
    "system": [SYSTEM, USER, ANSWER, AGAIN],
    "developer": [DEVELOPER, USER],
    "system and developer": [SYSTEM, DEVELOPER, USER],
    "system later on": [SYSTEM, USER, ANSWER, says("system", "system-2"), AGAIN],
    "developer at the end": [USER, ANSWER, AGAIN, DEVELOPER],
    "null fields": [USER, {**ANSWER, "tool_calls": None, "refusal": None, "audio": None}, AGAIN],
    "empty fields": [USER, {**ANSWER, "tool_calls": [], "reasoning_content": ""}, AGAIN],
    "parts": [says("user", "", content=[{**TEXT, "text": "user-1"}, {**TEXT, "text": "user-2"}])],
    "user twice": [USER, AGAIN],
    "call": [SYSTEM, USER, CALL, result(1), ANSWER, AGAIN],
    "text beside a call": [USER, {**CALL, "content": "beside-1"}, result(1)],
    "several calls": [SYSTEM, USER, CALLS, result(1), result(2)],
    "several calls, developer": [DEVELOPER, USER, {**CALLS, "content": "beside-1"}, result(1),
                                 result(2)],
    "function": [USER, {"role": "assistant", "function_call": call(1)["function"]},
                 says("function", "result-1", name="get_weather")],
}  # fmt: skip


def words(messages: Chat) -> set[str]:
    return set(WORD.findall(json.dumps(messages)))

"""OpenAI's `/v1/responses` as a chat: renamed fields, and typed events for the answer.

Nothing is stored: each request sends the whole conversation.
"""

import re
import time
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import AliasPath, Field, model_validator

from dflash_trt.errors import RequestError
from dflash_trt.serving.app.answers import Json, to_sse
from dflash_trt.serving.app.failures import Failure
from dflash_trt.serving.app.fields import ChatFields, Effort
from dflash_trt.serving.client import Summary

STORED = {"previous_response_id", "conversation"}
# chat fields that this API lacks
NOT_HERE = {"messages", "max_tokens", "max_completion_tokens", "response_format", "n"}
NOT_HERE |= {"reasoning_effort", "logprobs", "sent", "origins"}
LOGPROBS = "message.output_text.logprobs"  # of `include`
# request fields that a response repeats, and their defaults
REPEATED: Json = {
    **dict.fromkeys(("instructions", "max_output_tokens", "max_tool_calls", "user")),
    **{"metadata": {}, "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": []},
    **{"reasoning": {"effort": None, "summary": None}, "top_logprobs": 0},
}
STATELESS = {"store": False, "background": False, "previous_response_id": None}
# where items hold text, and the names of its parts and events
TEXTS = {
    "reasoning": ("summary", "reasoning_summary_part", "reasoning_summary_text"),
    "message": ("content", "content_part", "output_text"),
}
EMPTY: Json = {
    "reasoning": {"type": "summary_text", "text": ""},
    "message": {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
}
ORDER = ("role", "reasoning_content", "content", "tool_calls")  # in one message of a chat


class ResponseFields(ChatFields):
    """Fields of `/v1/responses`; `sent`: as received, `origins`: source of each message."""

    kind = "responses"
    prompt_field = "input"
    max_completion_tokens: int | None = Field(None, validation_alias="max_output_tokens")
    reasoning_effort: Effort | None = Field(None, validation_alias=AliasPath("reasoning", "effort"))
    response_format: dict[str, Any] | None = Field(
        None, validation_alias=AliasPath("text", "format")
    )
    sent: Json = Field({}, exclude=True)
    origins: list[str] = Field([], exclude=True)

    @model_validator(mode="before")
    @classmethod
    def _as_chat(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        sent = {name: value for name, value in values.items() if value is not None}
        for name in sent.keys() & NOT_HERE:
            raise Failure(400, f"Unknown parameter: '{name}'.", name, "unknown_parameter")
        for name in sent.keys() & STORED:
            message = f"'{name}': nothing is stored here. Send the conversation as 'input'."
            raise Failure(400, message, name)
        chat = {**sent, "sent": sent}
        for name in ("instructions", "max_tool_calls", "input", "include"):
            chat.pop(name, None)
        for name, field, hints in (
            ("stream_options", "include_obfuscation", set[str]()),
            ("text", "format", {"verbosity"}),
            ("reasoning", "effort", {"summary", "generate_summary", "context", "mode"}),
        ):
            if isinstance(inner := sent.get(name), dict):
                used = {k: v for k, v in inner.items() if k not in hints and v is not None}
                if unknown := used.keys() - {field}:
                    path = f"{name}.{min(unknown)[:40]}"
                    raise Failure(400, f"Unknown parameter: '{path}'.", name, "unknown_parameter")
                chat = {k: v for k, v in chat.items() if k != name} | ({name: used} if used else {})
        tools, choice = sent.get("tools", []), sent.get("tool_choice")
        if isinstance(tools, list):
            chat["tools"] = [_tool(at, tool) for at, tool in enumerate(tools)]
        if isinstance(choice, dict) and choice.keys() == {"type", "name"}:
            chat["tool_choice"] = {"type": choice["type"], "function": {"name": choice["name"]}}
        if not isinstance(include := sent.get("include", []), list):
            raise Failure(400, "'include' must be a list.", "include")
        chat["logprobs"] = bool(sent.get("top_logprobs")) or LOGPROBS in include
        chat["messages"], chat["origins"] = _messages(sent)
        return chat

    def api_names(self) -> dict[str, str]:
        renamed = {"max_tokens": "max_output_tokens", "response_format": "text.format"}
        return {**super().api_names(), **renamed, "messages": "input"}

    def translate_refusal(self, error: RequestError) -> Failure:
        def origin(found: re.Match[str]) -> str:
            return self.origins[int(found[1])] if int(found[1]) < len(self.origins) else found[0]

        problem = re.sub(r"messages\[(\d{1,6})\]", origin, error.problem)
        failure = super().translate_refusal(RequestError(problem, error.fix))
        return failure if problem == error.problem else Failure(400, failure.message, "input")


def _tool(at: int, tool: Any) -> Json:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind != "function":
        message = f"'tools[{at}]' is of type {str(kind)[:40]!r}: only functions can be called here."
        raise Failure(400, message, "tools")
    return {"type": kind, "function": {name: tool[name] for name in tool if name != "type"}}


def _messages(sent: Json) -> tuple[list[Json], list[str]]:
    """Return messages and their origins; reasoning, text and calls in a row form one message."""
    items = sent.get("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise Failure(400, "'input' must be a text or a list of items.", "input")
    placed = [(f"input[{at}]", _message(f"input[{at}]", item)) for at, item in enumerate(items)]
    if "instructions" in sent:
        placed.insert(0, ("instructions", {"role": "system", "content": sent["instructions"]}))
    messages, origins = list[Json](), list[str]()
    for origin, message in placed:
        last = messages[-1] if messages else {}
        if last.get("role") == message["role"] == "assistant":
            if "tool_calls" in last and "tool_calls" in message:
                last["tool_calls"] += message["tool_calls"]
                continue
            if max(map(ORDER.index, last)) < max(map(ORDER.index, message)):
                last.update(message)
                continue
        messages.append(message)
        origins.append(origin)
    return messages, origins


def _message(place: str, item: Any) -> Json:
    item = item if isinstance(item, dict) else {"type": None}
    kind = item.get("type", "message")
    if kind == "message" and isinstance(item.get("role"), str):
        return {"role": item["role"], "content": item.get("content")}
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "tool_calls": [call]}
    if kind == "function_call_output":
        result = {"tool_call_id": item.get("call_id"), "content": item.get("output")}
        return {"role": "tool", **result}
    if kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        parts = parts if isinstance(parts, list) else [{"text": parts}]
        texts = [each.get("text") for each in parts if isinstance(each, dict)]
        thought = "\n".join(each for each in texts if isinstance(each, str))
        if item.get("encrypted_content") and not thought:
            raise Failure(400, f"'{place}.encrypted_content' cannot be read here.", "input")
        return {"role": "assistant", "reasoning_content": thought}
    what = "has no role" if kind == "message" else f"is of type {str(kind)[:40]!r}"
    message = f"'{place}' {what}: send messages, function calls, their outputs and reasoning."
    raise Failure(400, message, "input")


class ResponseWriter:
    """Builds a response and its events from a choice's pieces (`ChoiceWriter`)."""

    def __init__(self, fields: ResponseFields) -> None:
        self.response: Json = {
            **{"id": _new_id("resp"), "object": "response", "created_at": int(time.time())},
            **{"status": "in_progress", "model": fields.model, "output": [], "usage": None},
            **{"error": None, "incomplete_details": None, "truncation": "disabled"},
            **{name: getattr(fields, name) for name in ("temperature", "top_p")},
            **{"parallel_tool_calls": fields.parallel_tool_calls, **STATELESS},
            **{name: fields.sent.get(name, default) for name, default in REPEATED.items()},
        }
        self._events = 0
        self._item: Json | None = None  # being written

    def begin(self) -> Iterator[bytes]:
        yield self._event("created", response=self.response)
        yield self._event("in_progress", response=self.response)

    def push(self, pieces: Iterable[Json], final: Summary | None) -> Iterator[bytes]:
        for piece in pieces:
            delta, logprobs = piece["delta"], (piece["logprobs"] or {}).get("content", [])
            if "reasoning_content" in delta:
                yield from self._write("reasoning", delta["reasoning_content"])
            elif "content" in delta or (logprobs and self._item and "content" in self._item):
                yield from self._write("message", delta.get("content", ""), logprobs)
            for call in delta.get("tool_calls", []):
                yield from self._call(call)
        if final is None:
            return
        if not self.response["output"]:
            yield from self._write("message", "")
        cut = final.finish_reason == "length"
        yield from self._end("incomplete" if cut else "completed")
        reason = {"reason": "max_output_tokens"} if cut else None
        self.response |= {"status": "incomplete" if cut else "completed", "usage": _usage(final)}
        self.response["incomplete_details"] = reason
        yield self._event(self.response["status"], response=self.response)

    def fail(self, failure: Failure) -> Iterator[bytes]:
        yield from self._end("incomplete")
        error = {"code": failure.code or "server_error", "message": failure.message}
        self.response |= {"status": "failed", "error": error}
        yield self._event("failed", response=self.response)

    def _begin(self, item: Json) -> Iterator[bytes]:
        yield from self._end("completed")
        self._item = {**item, "status": "in_progress"}
        self.response["output"].append(self._item)
        yield self._event("output_item.added", item=self._item)

    def _call(self, call: Json) -> Iterator[bytes]:
        function = call["function"]
        if call.get("id"):
            called = {"call_id": call["id"], "name": function["name"], "arguments": ""}
            yield from self._begin({"id": _new_id("fc"), "type": "function_call", **called})
        if function["arguments"] and self._item:
            self._item["arguments"] += function["arguments"]
            yield self._event("function_call_arguments.delta", delta=function["arguments"])

    def _write(self, kind: str, text: str, logprobs: list[Json] | None = None) -> Iterator[bytes]:
        """Yield events that add text to an item of this kind, the current one if possible."""
        place, name, event = TEXTS[kind]
        number = {f"{place}_index": 0}
        if self._item is None or self._item["type"] != kind:
            role = {"role": "assistant"} if kind == "message" else {}
            yield from self._begin({"id": _new_id(kind), "type": kind, **role, place: []})
            yield self._event(f"{name}.added", **number, part=EMPTY[kind])
            assert self._item is not None
            self._item[place] = [{**EMPTY[kind]}]
        [part] = self._item[place]
        part["text"] += text
        more = {"logprobs": logprobs or []} if "logprobs" in part else {}
        part |= {key: part[key] + new for key, new in more.items()}
        if text or logprobs:
            yield self._event(f"{event}.delta", **number, delta=text, **more)

    def _end(self, status: str) -> Iterator[bytes]:
        if (item := self._item) is None:
            return
        item["status"] = status
        if item["type"] == "function_call":
            called = {name: item[name] for name in ("arguments", "name")}
            yield self._event("function_call_arguments.done", **called)
        else:
            place, name, event = TEXTS[item["type"]]
            [part] = item[place]
            number = {f"{place}_index": 0}
            values = {key: part[key] for key in ("text", "logprobs") if key in part}
            yield self._event(f"{event}.done", **number, **values)
            yield self._event(f"{name}.done", **number, part=part)
        yield self._event("output_item.done", item=item)
        self._item = None

    def _event(self, kind: str, **values: Any) -> bytes:
        if self._item is not None:
            values["output_index"] = len(self.response["output"]) - 1
            if "item" not in values:
                values["item_id"] = self._item["id"]
        self._events += 1
        name = f"response.{kind}"
        return to_sse({"type": name, "sequence_number": self._events - 1, **values}, name)


def _usage(summary: Summary) -> Json:
    return {
        "input_tokens": summary.prompt_tokens,
        "input_tokens_details": {"cached_tokens": summary.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": summary.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},  # reasoning is not counted separately
        "total_tokens": summary.prompt_tokens + summary.completion_tokens,
    }


def _new_id(kind: str) -> str:
    return f"{kind.replace('message', 'msg').replace('reasoning', 'rs')}_{uuid.uuid4().hex}"

"""The answer of `/v1/responses`: its items and their events, as OpenAI's types have them."""

import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dflash_trt.chat import CallDelta, ContentDelta, ReasoningDelta
from dflash_trt.serving.answer import Chunk
from dflash_trt.serving.http.answers import ChatReader, Json, to_sse
from dflash_trt.serving.http.failures import Failure
from dflash_trt.serving.http.logprobs import ContentLogprobs
from dflash_trt.serving.http.responses.request import ReadRequest
from dflash_trt.serving.http.responses.tools import Origin, custom_input

# where items hold text, and the names of its parts and events
TEXTS = {
    "reasoning": ("summary", "reasoning_summary_part", "reasoning_summary_text"),
    "message": ("content", "content_part", "output_text"),
}
EMPTY: Json = {
    "reasoning": {"type": "summary_text", "text": ""},
    "message": {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
}
PREFIXES = {
    "reasoning": "rs",
    "message": "msg",
    "function_call": "fc",
    "custom_tool_call": "ctc",
}
DEFAULT_SAMPLING = {"temperature": 1.0, "top_p": 1.0}


class ResponseWriter:
    """Builds a response and its events from an answer's chunks."""

    def __init__(
        self,
        read: ReadRequest,
        sampling: Mapping[str, float],
        reader: ChatReader,
        logprobs: ContentLogprobs,
        *,
        stored: bool,
    ) -> None:
        """Begin an answer.

        sampling: the model's own defaults; stored: whether the answer will be kept.
        """
        self._reader = reader
        self._logprobs = logprobs
        self._origins = read.origins
        self.response = begun_response(read, sampling, stored=stored)
        self._events = 0
        self._item: Json | None = None  # being written
        self._arguments = ""  # of a custom tool's call, whose input is in them

    def begin(self) -> Iterator[bytes]:
        yield self._event("created", response=self.response)
        yield self._event("in_progress", response=self.response)

    def push(self, chunk: Chunk) -> Iterator[bytes]:
        if chunk.logprobs:
            self._logprobs.add(chunk)
        for part in self._reader.read(chunk).parts:
            if isinstance(part, ReasoningDelta):
                yield from self._write("reasoning", part.text)
            elif isinstance(part, ContentDelta):
                yield from self._write("message", part.text, self._logprobs.of(part.spans))
            else:
                yield from self._call(part)

    def end(self, last: Chunk, keep: Callable[[Json], bool]) -> Iterator[bytes]:
        """Yield the last events; keep: takes the whole response, and returns whether it is kept."""
        if not self.response["output"]:
            yield from self._write("message", "")
        status, details = "completed", None
        if last.finish_reason == "length":
            status, details = "incomplete", {"reason": "max_output_tokens"}
        yield from self._end_item(status)
        self.response |= {
            "status": status,
            "incomplete_details": details,
            "usage": _usage(last),
        }
        self.response["store"] = keep(self.response)
        yield self._event(status, response=self.response)

    def fail(self, failure: Failure) -> Iterator[bytes]:
        yield from self._end_item("incomplete")
        error = {"code": failure.code or "server_error", "message": failure.message}
        self.response |= {"status": "failed", "error": error, "store": False}
        yield self._event("failed", response=self.response)

    def _begin_item(self, kind: str, **fields: Any) -> Json:
        item = {"id": _new_id(PREFIXES[kind]), "type": kind, **fields, "status": "in_progress"}
        self._item = item
        self.response["output"].append(item)
        return item

    def _call(self, call: CallDelta) -> Iterator[bytes]:
        if call.id:
            yield from self._end_item("completed")
            item = self._begin_call(call.id, self._origins.get(call.name, Origin(call.name)))
            yield self._event("output_item.added", item=item)
        if not call.arguments or self._item is None:
            return
        if self._item["type"] == "custom_tool_call":
            self._arguments += call.arguments
            return
        self._item["arguments"] += call.arguments
        yield self._event("function_call_arguments.delta", delta=call.arguments)

    def _begin_call(self, call_id: str, origin: Origin) -> Json:
        named = {"call_id": call_id, "name": origin.name}
        if origin.namespace is not None:
            named["namespace"] = origin.namespace
        if origin.custom:
            self._arguments = ""
            return self._begin_item("custom_tool_call", **named, input="")
        return self._begin_item("function_call", **named, arguments="")

    def _write(self, kind: str, text: str, logprobs: list[Json] | None = None) -> Iterator[bytes]:
        """Yield events that add text to an item of this kind, the current one if possible."""
        place, part_event, text_event = TEXTS[kind]
        number = {f"{place}_index": 0}
        if self._item is None or self._item["type"] != kind:
            yield from self._end_item("completed")
            role = {"role": "assistant"} if kind == "message" else {}
            item = self._begin_item(kind, **role, **{place: []})
            yield self._event("output_item.added", item=item)
            yield self._event(f"{part_event}.added", **number, part=EMPTY[kind])
            item[place] = [dict(EMPTY[kind])]
        assert self._item is not None
        [part] = self._item[place]
        part["text"] += text
        more = {}
        if kind == "message":
            more["logprobs"] = logprobs or []
            part["logprobs"] = part["logprobs"] + more["logprobs"]
        if text or logprobs:
            yield self._event(f"{text_event}.delta", **number, delta=text, **more)

    def _end_item(self, status: str) -> Iterator[bytes]:
        item = self._item
        if item is None:
            return
        item["status"] = status
        if item["type"] == "function_call":
            called = {name: item[name] for name in ("arguments", "name")}
            yield self._event("function_call_arguments.done", **called)
        elif item["type"] == "custom_tool_call":
            item["input"] = custom_input(self._arguments)
            yield self._event("custom_tool_call_input.delta", delta=item["input"])
            yield self._event("custom_tool_call_input.done", input=item["input"])
        else:
            yield from self._end_text(item)
        yield self._event("output_item.done", item=item)
        self._item = None

    def _end_text(self, item: Json) -> Iterator[bytes]:
        place, part_event, text_event = TEXTS[item["type"]]
        [part] = item[place]
        number = {f"{place}_index": 0}
        values = {name: part[name] for name in ("text", "logprobs") if name in part}
        yield self._event(f"{text_event}.done", **number, **values)
        yield self._event(f"{part_event}.done", **number, part=part)

    def _event(self, kind: str, **values: Any) -> bytes:
        if self._item is not None:
            values["output_index"] = len(self.response["output"]) - 1
            if "item" not in values:
                values["item_id"] = self._item["id"]
        number = self._events
        self._events += 1
        name = f"response.{kind}"
        return to_sse({"type": name, "sequence_number": number, **values}, name)


def begun_response(read: ReadRequest, sampling: Mapping[str, float], *, stored: bool) -> Json:
    request = read.request
    text: Json = {"format": request.text.format or {"type": "text"}}
    if request.text.verbosity is not None:
        text["verbosity"] = request.text.verbosity
    used = {
        name: sampling.get(name, default)
        if getattr(request, name) is None
        else getattr(request, name)
        for name, default in DEFAULT_SAMPLING.items()
    }
    return {
        "id": _new_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "model": request.model,
        "output": [],
        "usage": None,
        "error": None,
        "incomplete_details": None,
        "truncation": read.request.truncation or "disabled",
        **used,
        "parallel_tool_calls": request.parallel_tool_calls,
        "background": False,
        "store": stored,
        "previous_response_id": request.previous_response_id,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "user": request.user,
        "metadata": request.metadata,
        "text": text,
        "tool_choice": request.tool_choice,
        "tools": request.tools,
        "reasoning": request.reasoning.model_dump(include={"effort", "summary"}),
        "top_logprobs": request.top_logprobs,
    }


def _usage(last: Chunk) -> Json:
    return {
        "input_tokens": last.prompt_tokens,
        "input_tokens_details": {"cached_tokens": last.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": last.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},  # reasoning is not counted separately
        "total_tokens": last.prompt_tokens + last.completion_tokens,
    }


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"

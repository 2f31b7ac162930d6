"""The request of `/v1/responses`: its own fields, and the chat that answers it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, PrivateAttr, ValidationError

from dflash_trt.errors import RequestError
from dflash_trt.request_schema import Int32, Many, Schema
from dflash_trt.serving.http.failures import Failure, first_fault_of, translate_refusal
from dflash_trt.serving.http.fields import (
    MAX_FIELDS,
    ChatFields,
    Effort,
    without_neutral_fields,
)
from dflash_trt.serving.http.responses.items import Messages, Placed, to_messages
from dflash_trt.serving.http.responses.store import ResponseStore
from dflash_trt.serving.http.responses.tools import Origin, Tools, read_choice, read_tools

Json = dict[str, Any]
LOGPROBS = "message.output_text.logprobs"  # of `include`
Include = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]
Pairs = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
]
# fields of a chat that this API lacks
NOT_HERE = {"messages", "max_tokens", "max_completion_tokens", "response_format", "n"}
NOT_HERE |= {"reasoning_effort", "logprobs", "echo", "functions", "function_call"}
REPEATED_HINTS = {"metadata", "user", "store"}  # of no effect on an answer's text
# how this API calls fields of a chat
NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "messages": "input",
}
TOOL_PLACE = re.compile(r"tools\[(\d{1,6})\](?:\.function)?")
TEXT_PART = '{"type": "text", "text": ".."}'
OUR_TEXT_PART = '{"type": "input_text", "text": ".."}'


class StreamOptions(Schema):
    include_obfuscation: Any = None  # accepted, without effect


class TextOptions(Schema):
    format: Json | None = None
    verbosity: Literal["low", "medium", "high"] | None = None  # a hint, without effect


class Reasoning(Schema):
    effort: Effort | None = None
    # hints, without effect
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    mode: str | None = None


class ResponseRequest(Schema):
    """Fields of `/v1/responses`; others are those of a chat (`ChatFields`)."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str
    input: Any
    instructions: str | None = None
    max_output_tokens: Int32 | None = None
    max_tool_calls: int | None = Field(None, ge=1)
    include: list[Include] = Field([], max_length=16)
    text: TextOptions = TextOptions()
    reasoning: Reasoning = Reasoning()
    tools: Many[Any] = Field([])
    tool_choice: Any = "auto"
    top_logprobs: int = Field(0, ge=0, le=20)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    store: bool = True
    previous_response_id: str | None = None
    metadata: Pairs = Field({})
    client_metadata: dict[str, str] = Field({})  # a hint, without effect
    user: str | None = Field(None, max_length=512)
    temperature: float | None = None
    top_p: float | None = None
    parallel_tool_calls: bool = True
    truncation: Literal["auto", "disabled"] | None = None  # an input that does not fit is refused

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or LOGPROBS in self.include


class ResponseChat(ChatFields):
    """The chat of a response, whose refusals speak of the response's fields."""

    kind = "responses"
    prompt_field = "input"
    _messages: Messages = PrivateAttr(default_factory=Messages)
    _tools: Tools = PrivateAttr(default_factory=Tools)

    def api_names(self) -> dict[str, str]:
        return {**super().api_names(), **NAMES}

    def translate_refusal(self, error: RequestError) -> Failure:
        problem = self._messages.in_words_of_the_request(error.problem)
        problem = TOOL_PLACE.sub(self._tool_place, problem)
        fix = error.fix.replace(TEXT_PART, OUR_TEXT_PART)
        failure = translate_refusal(RequestError(problem, fix), self.api_names(), "input")
        if problem.startswith("input["):
            return Failure(400, failure.message, "input", failure.code)
        return failure

    def _tool_place(self, match: re.Match[str]) -> str:
        index = int(match[1])
        places = self._tools.places
        return places[index] if index < len(places) else match[0]


@dataclass(frozen=True)
class ReadRequest:
    """A request, the chat that answers it, and what the answer needs to know of it."""

    request: ResponseRequest
    chat: ResponseChat
    items: list[Json]  # of the whole conversation
    tools: Tools

    @property
    def origins(self) -> Mapping[str, Origin]:
        return self.tools.origins


def read_request(body: Json, store: ResponseStore, owner: str) -> ReadRequest:
    """Return a request that was sent; Failure names what is wrong in it."""
    if len(body) > MAX_FIELDS:
        raise Failure(400, f"The body has more than {MAX_FIELDS} fields.")
    fields = without_neutral_fields(body, "responses")
    fields |= {name: body[name] for name in REPEATED_HINTS & body.keys()}
    for name in fields.keys() & NOT_HERE:
        raise Failure(400, f"Unknown parameter: '{name}'.", name, "unknown_parameter")
    if fields.get("conversation") is not None:
        message = "'conversation' is not kept here: send 'previous_response_id', or all items."
        raise Failure(400, message, "conversation")
    try:
        request = ResponseRequest.model_validate(fields)
    except ValidationError as error:
        raise first_fault_of(error) from None
    placed = _earlier(request, store, owner) + _sent(request, store, owner)
    messages = to_messages(request.instructions, placed)
    choice, tools = read_choice(request.tool_choice, read_tools(request.tools))
    _check_format(request.text.format)
    try:
        chat = ResponseChat.model_validate(_chat_fields(request, messages, choice, tools))
    except ValidationError as error:
        raise first_fault_of(error, NAMES) from None
    chat._messages, chat._tools = messages, tools
    return ReadRequest(request, chat, [part.item for part in placed], tools)


def _earlier(request: ResponseRequest, store: ResponseStore, owner: str) -> list[Placed]:
    name = request.previous_response_id
    if name is None:
        return []
    conversation = store.conversation(owner, name)
    if conversation is None:
        message = (
            f"Previous response with id {name[:80]!r} is not found: answers are kept for an hour "
            "at most. Send the whole conversation as 'input'."
        )
        raise Failure(400, message, "previous_response_id", "previous_response_not_found")
    return [Placed(f"{name}[{index}]", item) for index, item in enumerate(conversation.items)]


def _sent(request: ResponseRequest, store: ResponseStore, owner: str) -> list[Placed]:
    if isinstance(request.input, str):
        return [Placed("input", {"role": "user", "content": request.input})]
    if not isinstance(request.input, list) or not request.input:
        raise Failure(400, "'input' must be a text or a list of items.", "input")
    placed = []
    for index, item in enumerate(request.input):
        place = f"input[{index}]"
        if isinstance(item, dict) and item.get("type") == "item_reference":
            item = _referred(place, item.get("id"), store, owner)
        placed.append(Placed(place, item))
    return placed


def _referred(place: str, name: Any, store: ResponseStore, owner: str) -> Json:
    item = store.item(owner, name) if isinstance(name, str) else None
    if item is None:
        message = (
            f"'{place}' refers to {str(name)[:80]!r}, which is not kept here: answers are kept "
            "for an hour at most. Set 'store' to false in your client, so that it sends the items."
        )
        raise Failure(400, message, "input")
    return item


def _check_format(form: Json | None) -> None:
    kind = (form or {"type": "text"}).get("type")
    if kind not in ("text", "json_object", "json_schema"):
        message = "'text.format.type' must be text, json_object or json_schema."
        raise Failure(400, message, "text.format")
    if kind == "json_schema" and not isinstance((form or {}).get("schema"), dict | bool):
        raise Failure(400, "'text.format.schema' must be a JSON schema.", "text.format")


def _chat_fields(request: ResponseRequest, messages: Messages, choice: Any, tools: Tools) -> Json:
    """Return the fields of the chat, those alone that were sent."""
    sent = request.model_fields_set
    fields: Json = {
        **(request.model_extra or {}),
        "model": request.model,
        "messages": messages.messages,
        "stream": request.stream,
    }
    for name in ("temperature", "top_p", "parallel_tool_calls"):
        if name in sent:
            fields[name] = getattr(request, name)
    if tools.functions:
        fields["tools"] = tools.functions
        fields["tool_choice"] = choice
    if request.max_output_tokens is not None:
        fields["max_completion_tokens"] = request.max_output_tokens
    if request.reasoning.effort is not None:
        fields["reasoning_effort"] = request.reasoning.effort
    if request.text.format is not None:
        fields["response_format"] = request.text.format
    if request.wants_logprobs:
        fields["logprobs"] = True
        fields["top_logprobs"] = request.top_logprobs
    return fields

"""Request fields of `/v1/chat/completions` and `/v1/completions`.

Includes vLLM's extensions to OpenAI's fields. An unknown field is refused; so is one without
effect, unless its value is neutral.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from dflash_trt.errors import RequestError
from dflash_trt.request_schema import (
    ChatTemplate,
    GenerateRequest,
    Int32,
    Many,
    Sampling,
    Schema,
    Words,
)
from dflash_trt.serving.client import AnyPrompt
from dflash_trt.serving.http.failures import Failure, first_fault_of, translate_refusal

MAX_FIELDS = 100
MAX_PROMPTS = 64
STRUCTURED = ("json", "regex", "choice", "grammar")  # of `structured_outputs`: `guided_json`, ..
UNSUPPORTED = yaml.safe_load(Path(__file__).with_name("unsupported.yaml").read_text())
Options = dict[str, Any]  # of our client
NEEDS = {"stream_options": "stream", "top_logprobs": "logprobs", "tool_choice": "tools"}
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def _best_of(value: int, info: ValidationInfo) -> int:
    """Accept only a value that selects none: 1 or n."""
    if value not in (1, info.data.get("n")):
        raise ValueError("is not supported by this server, unless it is n")
    return value


def _as_list(words: Any) -> Any:
    return [words] if isinstance(words, str) else words


def _list_of_prompts(prompt: Any) -> list[AnyPrompt]:
    prompts = prompt if isinstance(prompt, list) and not _are_ids(prompt) else [prompt]
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise ValueError(f"must hold 1 to {MAX_PROMPTS} prompts")
    if not all(isinstance(entry, str) or _are_ids(entry) for entry in prompts):
        raise ValueError("must be a string, a list of token ids, or a list of either")
    if len(prompts) > 1 and "" in prompts:  # one alone is refused by the model, before any answer
        raise ValueError("must hold no empty prompt")
    return list(prompts)


def _are_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and prompt != [] and all(type(token) is int for token in prompt)


def without_neutral_fields(values: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the fields that have an effect; Failure for one that this server cannot have.

    kind: of the request, a section of unsupported.yaml.
    """
    neutral = UNSUPPORTED["both"] | UNSUPPORTED[kind]
    for name in neutral.keys() & values.keys():
        if values[name] is not None and values[name] not in neutral[name]:
            raise Failure(400, f"'{name}' is not supported by this server.", name)
    dropped = {*UNSUPPORTED["ignored"], *neutral}
    return {name: value for name, value in values.items() if name not in dropped}


class StreamOptions(Schema):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # usage so far in every chunk, with include_usage
    include_drafting: bool = False  # report who wrote each token and what rounds proposed
    include_obfuscation: Any = None  # accepted, without effect


class Fields(Sampling):
    """Fields of both kinds of request."""

    kind: ClassVar[str]
    prompt_field: ClassVar[str]
    model: str
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)  # OpenAI's default
    top_k: Int32 = Field(0, ge=-1)  # vLLM's -1 is off
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    n: Int32 = Field(1, ge=1)
    stop: Annotated[Words, BeforeValidator(_as_list)] = Field([])
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    timeout: float | None = Field(None, gt=0, le=3600)  # seconds
    best_of: Annotated[int | None, AfterValidator(_best_of)] = None
    echo: bool = False
    guided_json: Any = None  # a schema, or its JSON as a string
    structured_outputs: dict[str, Any] = Field({})

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        if len(values) > MAX_FIELDS:
            raise ValueError(f"more than {MAX_FIELDS} fields")
        return without_neutral_fields(values, cls.kind)

    @model_validator(mode="after")
    def _refuse_without_what_it_needs(self) -> Self:
        sent = self.model_fields_set
        for name, needed in NEEDS.items():
            asks = name in sent and getattr(self, name) not in (0, "none", StreamOptions())
            if asks and (needed not in sent or getattr(self, needed) is False):
                raise Failure(400, f"'{name}' needs '{needed}': send both or neither.", name)
        return self

    def api_names(self) -> dict[str, str]:
        same = {name: name for name in type(self).model_fields}
        same |= {f"guided_{name}": "structured_outputs" for name in self.structured_outputs}
        return {**same, "stop_words": "stop"}

    def translate_refusal(self, error: RequestError) -> Failure:
        return translate_refusal(error, self.api_names(), self.prompt_field)

    def options(self) -> Options:
        known = {*GenerateRequest.model_fields, "timeout"} - {"messages", "stream", "logprobs"}
        options = {name: getattr(self, name) for name in self.model_fields_set & known}
        options["temperature"] = self.temperature
        options["top_k"] = max(0, self.top_k)
        options["seed"] = None if self.seed is None else self.seed % 2**63
        if self.response_format == {"type": "text"}:
            options["response_format"] = None
        if self.stream and self.stream_options.include_drafting:
            options["include_drafting"] = True
        options["stop_words"] = self.stop
        for name, value in options.items():
            if value in ([], {}):
                options[name] = None
        return {**options, **self._structured()}

    def _structured(self) -> dict[str, Any]:
        """Return vLLM's grammar fields; an empty schema counts as one."""
        options = {} if self.guided_json is None else {"guided_json": self.guided_json}
        structured = {
            name: value
            for name, value in self.structured_outputs.items()
            if value not in (None, False)
        }
        guided = [f"guided_{name}" for name in STRUCTURED]
        sent = [name for name in guided if name in self.model_fields_set]
        sent += [f"structured_outputs.{name}" for name in STRUCTURED if name in structured]
        if structured and len(sent) > 1:
            message = f"{' and '.join(map(repr, sent))} are both given: send one of them."
            raise Failure(400, message, "structured_outputs")
        for name, value in structured.items():
            if name not in STRUCTURED:
                message = f"'structured_outputs.{name[:40]}' is not supported by this server."
                raise Failure(400, message, "structured_outputs")
            options[f"guided_{name}"] = value
        name = "structured_outputs" if self.guided_json is None else "guided_json"
        schema = options.get("guided_json", {})
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise Failure(400, f"'{name}' is not JSON: {error}.", name) from error
            options["guided_json"] = schema
        if not isinstance(schema, dict):
            raise Failure(400, f"'{name}' must hold a JSON schema.", name)
        return options


FieldsT = TypeVar("FieldsT", bound=Fields)


def fields_of(kind: type[FieldsT], body: dict[str, Any]) -> FieldsT:
    """Return the fields of a body. Raises Failure naming the first that is wrong."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise first_fault_of(error) from None


class Message(BaseModel):
    """A chat message, passed to the model with all its fields."""

    model_config = ConfigDict(extra="allow")
    role: str


class ChatFields(ChatTemplate, Fields):
    """Fields of `/v1/chat/completions`."""

    kind = "chat"
    prompt_field = "messages"
    messages: Many[Message] = Field(min_length=1)
    max_completion_tokens: Int32 | None = None
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    reasoning_effort: Effort | None = None  # for the chat template

    def api_names(self) -> dict[str, str]:
        names = super().api_names()
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        return names

    def prompts_and_options(self) -> tuple[list[AnyPrompt], Options]:
        options = self.options()
        if self.max_completion_tokens is not None:
            if self.max_tokens not in (None, self.max_completion_tokens):
                message = "'max_tokens' and 'max_completion_tokens' differ: send one of them."
                raise Failure(400, message, "max_tokens")
            options["max_tokens"] = self.max_completion_tokens
        options["logprobs"] = self.top_logprobs if self.logprobs else None
        effort = {"reasoning_effort": self.reasoning_effort} if self.reasoning_effort else {}
        options["chat_template_kwargs"] = {**effort, **self.chat_template_kwargs} or None
        return [[message.model_dump(exclude_unset=True) for message in self.messages]], options


class TextFields(Fields):
    """Fields of `/v1/completions`."""

    kind = "text"
    prompt_field = "prompt"
    prompt: Annotated[Any, AfterValidator(_list_of_prompts)]
    max_tokens: Int32 = 16  # OpenAI's default
    logprobs: int | None = Field(None, ge=0, le=20)

    def api_names(self) -> dict[str, str]:
        return {**super().api_names(), "text_input": "prompt", "input_ids": "prompt"}

    def prompts_and_options(self) -> tuple[list[AnyPrompt], Options]:
        options = {**self.options(), "max_tokens": self.max_tokens, "logprobs": self.logprobs}
        options["exclude_input_in_output"] = not self.echo
        return self.prompt, options

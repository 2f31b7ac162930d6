"""What may be sent to `/v1/chat/completions` and `/v1/completions`, in our client's words.

Beside OpenAI's fields, the extensions that vLLM's users know. A field that would have no effect is
refused unless its value asks for nothing; so is an unknown one.
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    ValidationInfo,
    model_validator,
)

from dflash_trt.errors import RequestError
from dflash_trt.serving.client import AnyPrompt, Options
from dflash_trt.serving.client.fields import DATATYPES
from dflash_trt.serving.openai.failures import Failure, refused

MAX_FIELDS = 100
MAX_PROMPTS = 64
T = TypeVar("T")


class FirstFault(FailFast):
    """Ends at the first fault: a report of a million of them takes 10 s and 2 GB."""

    __hash__ = object.__hash__  # a union wants one


Many = Annotated[list[T], FirstFault()]


def _not_done(*neutral: Any) -> AfterValidator:
    """A field of which only the values that ask for nothing are accepted."""

    def check(value: Any) -> Any:
        if value is not None and value not in neutral:
            raise ValueError("is not supported by this server")
        return value

    return AfterValidator(check)


def _best_of(value: int | None, info: ValidationInfo) -> int | None:
    """Only the one that picks none: as many as are given back."""
    if value not in (None, 1, info.data.get("n")):
        raise ValueError("is not supported by this server, unless it is n")
    return value


def _prompts(prompt: Any) -> list[AnyPrompt]:
    """A text, token ids, or a list of either, as a list; ValueError."""
    several = isinstance(prompt, list) and not _are_ids(prompt)
    prompts = prompt if several else [prompt]
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise ValueError(f"must hold 1 to {MAX_PROMPTS} prompts")
    if not all(isinstance(each, str) or _are_ids(each) for each in prompts):
        raise ValueError("must be a string, a list of token ids, or a list of either")
    return list(prompts)


def _are_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and prompt != [] and all(type(each) is int for each in prompt)


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # with include_usage: in every chunk, so far
    include_obfuscation: Any = None  # accepted, without effect


class Fields(BaseModel):
    """What both kinds of request share."""

    model_config = ConfigDict(extra="forbid")
    model: str
    max_tokens: int | None = None
    temperature: float | None = None  # None: 1.0, as OpenAI has it
    top_p: float | None = None
    n: int | None = Field(None, ge=1)
    seed: int | None = None
    stop: str | Many[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # extensions
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    bad_words: Many[str] | None = None
    stop_token_ids: Many[int] | None = None
    priority: int | None = None
    timeout: float | None = Field(None, gt=0, le=3600)  # seconds
    # accepted, without effect on the answer
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    parallel_tool_calls: Any = None
    # refused
    logit_bias: Annotated[Any, _not_done({})] = None
    response_format: Annotated[Any, _not_done({"type": "text"})] = None
    skip_special_tokens: Annotated[Any, _not_done(True)] = None
    spaces_between_special_tokens: Annotated[Any, _not_done(True)] = None
    include_stop_str_in_output: Annotated[Any, _not_done(False)] = None
    truncate_prompt_tokens: Annotated[Any, _not_done()] = None
    allowed_token_ids: Annotated[Any, _not_done()] = None
    logits_processors: Annotated[Any, _not_done([])] = None
    prompt_logprobs: Annotated[Any, _not_done()] = None
    return_token_ids: Annotated[Any, _not_done(False)] = None
    return_tokens_as_token_ids: Annotated[Any, _not_done(False)] = None
    best_of: Annotated[int | None, AfterValidator(_best_of)] = None
    use_beam_search: Annotated[Any, _not_done(False)] = None
    length_penalty: Annotated[Any, _not_done(1)] = None
    structured_outputs: Annotated[Any, _not_done()] = None
    guided_json: Annotated[Any, _not_done()] = None
    guided_regex: Annotated[Any, _not_done()] = None
    guided_choice: Annotated[Any, _not_done()] = None
    guided_grammar: Annotated[Any, _not_done()] = None
    guided_decoding_backend: Annotated[Any, _not_done()] = None
    guided_whitespace_pattern: Annotated[Any, _not_done()] = None
    cache_salt: Annotated[Any, _not_done()] = None
    kv_transfer_params: Annotated[Any, _not_done()] = None

    @model_validator(mode="before")
    @classmethod
    def _few(cls, values: Any) -> Any:
        if isinstance(values, dict) and len(values) > MAX_FIELDS:
            raise ValueError(f"more than {MAX_FIELDS} fields")
        return values

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        options = self.stream_options
        return bool(options and options.include_usage and options.continuous_usage_stats)

    def names(self) -> dict[str, str]:
        """What inputs of the model are called here."""
        same = {name: name for name in (*DATATYPES, "timeout") if name in type(self).model_fields}
        return {**same, "stop_words": "stop"}

    def refused(self, error: RequestError) -> Failure:
        """What the server said of it, in these words."""
        prompt = "messages" if isinstance(self, ChatFields) else "prompt"
        return refused(error, self.names(), prompt)

    def options(self) -> Options:
        """The fields that mean the same to our client."""
        return Options(
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=None if self.top_k is None else max(0, self.top_k),  # vLLM: -1 is off
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=None if self.seed is None else self.seed % 2**63,  # OpenAI's may be negative
            stop_words=([self.stop] if isinstance(self.stop, str) else self.stop) or None,
            stop_token_ids=self.stop_token_ids or None,
            bad_words=self.bad_words or None,
            ignore_eos=self.ignore_eos,
            n=self.n,
            priority=self.priority,
            timeout=self.timeout,
        )


class TextPart(BaseModel):
    """A part of a message's content; only text is read."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["text"]
    text: str


class Message(BaseModel):
    """Handed to the chat template with all its fields, the content as one text."""

    model_config = ConfigDict(extra="allow")
    role: str
    content: str | Many[TextPart] | None = None

    def flat(self) -> dict[str, Any]:
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        return {**self.model_dump(exclude_unset=True), "content": content or ""}


class ChatFields(Fields):
    """`/v1/chat/completions`."""

    messages: Many[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: Many[dict[str, Any]] | None = None
    tool_choice: Annotated[Any, _not_done("auto", "none")] = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    echo: Annotated[Any, _not_done(False)] = None
    add_special_tokens: Annotated[Any, _not_done(False)] = None
    continue_final_message: Annotated[Any, _not_done(False)] = None
    chat_template: Annotated[Any, _not_done()] = None
    documents: Annotated[Any, _not_done([])] = None
    include_reasoning: Annotated[Any, _not_done(True)] = None
    mm_processor_kwargs: Annotated[Any, _not_done({})] = None
    functions: Annotated[Any, _not_done([])] = None
    function_call: Annotated[Any, _not_done("auto", "none")] = None
    modalities: Annotated[Any, _not_done(["text"])] = None
    audio: Annotated[Any, _not_done()] = None
    prediction: Annotated[Any, _not_done()] = None
    reasoning_effort: str | None = None  # for the chat template
    verbosity: Annotated[Any, _not_done()] = None
    web_search_options: Annotated[Any, _not_done()] = None

    def names(self) -> dict[str, str]:
        renamed = self.max_completion_tokens is not None
        return super().names() | ({"max_tokens": "max_completion_tokens"} if renamed else {})

    def request(self) -> tuple[list[AnyPrompt], Options]:
        """The prompts, and how each of them is to be answered."""
        options = self.options()
        if self.max_completion_tokens is not None:
            options["max_tokens"] = self.max_completion_tokens
        if self.logprobs:
            options["logprobs"] = self.top_logprobs or 0
        options["tools"] = None if self.tool_choice == "none" else self.tools or None
        effort = {"reasoning_effort": self.reasoning_effort} if self.reasoning_effort else {}
        options["chat_template_kwargs"] = {**effort, **(self.chat_template_kwargs or {})} or None
        options["add_generation_prompt"] = self.add_generation_prompt
        return [[message.flat() for message in self.messages]], options


class TextFields(Fields):
    """`/v1/completions`."""

    prompt: Annotated[Any, AfterValidator(_prompts)]
    max_tokens: int | None = 16  # OpenAI's default
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None
    add_special_tokens: Annotated[Any, _not_done(True)] = None
    suffix: Annotated[Any, _not_done("")] = None

    def names(self) -> dict[str, str]:
        return {**super().names(), "text_input": "prompt", "input_ids": "prompt"}

    def request(self) -> tuple[list[AnyPrompt], Options]:
        """The prompts, and how each of them is to be answered."""
        options = self.options()
        options["logprobs"] = self.logprobs
        options["exclude_input_in_output"] = False if self.echo else None
        return self.prompt, options

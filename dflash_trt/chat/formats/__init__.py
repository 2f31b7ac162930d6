"""Formats of reasoning, content and calls in answers: one file each, chosen by probing."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_trt.chat.formats import gemma, harmony, hermes, llama, mistral, qwen_coder
from dflash_trt.chat.formats.definitions import Tool, parse_tools, required_tools
from dflash_trt.chat.formats.lark import Lark
from dflash_trt.chat.formats.reader import AnswerDelta, CallDelta, Reader, Span, Steps
from dflash_trt.errors import RequestError


@dataclass(frozen=True)
class Format:
    name: str  # of vLLM's parser
    sign: str  # occurs in every call of this format
    markers: tuple[str, ...]  # required in the text, special tokens or not
    read: Callable[[Reader, Sequence[Tool]], Steps[None]]
    calls: Callable[..., str]  # (lark, tools, parallel=..): grammar of calls


@dataclass(frozen=True)
class ReasoningTags:
    open: str
    close: str
    label: str = ""  # after `open`


HERMES = Format("hermes", hermes.OPEN, hermes.MARKERS, hermes.read, hermes.calls)
HARMONY = Format("openai", harmony.OURS, harmony.MARKERS, harmony.read, harmony.calls)
FORMATS = (
    Format("qwen3_coder", qwen_coder.SIGN, qwen_coder.MARKERS, qwen_coder.read, qwen_coder.calls),
    HERMES,
    Format("gemma4", gemma.OPEN, gemma.MARKERS, gemma.read, gemma.calls),
    Format("mistral", mistral.ID, mistral.MARKERS, mistral.read, mistral.calls_with_id),
    Format("mistral", mistral.ARGUMENTS, mistral.MARKERS, mistral.read, mistral.calls),
    Format("mistral", mistral.OPEN, mistral.MARKERS, mistral.read, mistral.list_calls),
    HARMONY,
    Format("llama3_json", '"parameters": {', llama.MARKERS, llama.read, llama.calls),
)
REASONING_TAGS = (
    ReasoningTags("<think>", "</think>"),
    ReasoningTags("[THINK]", "[/THINK]"),
    ReasoningTags("<|channel>", "<channel|>", "thought\n"),
)


class AnswerParser:
    """Parses one answer into reasoning, calls and content, incrementally.

    format: None: no calls; thinking: it begins within reasoning, which the prompt opened.
    """

    def __init__(
        self,
        format: Format | None,
        tools: Sequence[Tool],
        tags: ReasoningTags | None,
        *,
        thinking: bool = False,
    ) -> None:
        self._reader = Reader()
        self._steps = _parse(self._reader, format, tools, tags, thinking)

    def push(self, text: str, *, last: bool) -> AnswerDelta:
        self._reader.text += text
        self._reader.ended = last
        next(self._steps, None)
        delta = self._reader.delta
        self._reader.delta = AnswerDelta()
        return delta


def _parse(
    reader: Reader,
    format: Format | None,
    tools: Sequence[Tool],
    tags: ReasoningTags | None,
    thinking: bool,
) -> Steps[None]:
    if tags and (thinking or (yield from reader.skip(tags.open + tags.label))):
        if (yield from reader.until((tags.close,), reader.add_reasoning)) is not None:
            reader.take(len(tags.close))
        reader.add_reasoning("")
    if format:
        yield from format.read(reader, tools)
    yield from reader.add_rest()


def grammar(
    format: Format | None,
    tools: Sequence[Tool],
    tags: ReasoningTags | None,
    added: Mapping[str, int],
    *,
    parallel: bool,
    thinking: bool,
    answer: Any = None,
) -> str:
    """Return an llguidance grammar: reasoning, then one or more calls of the tools.

    added: ids of the tokenizer's added tokens. answer: JSON schema of a text allowed instead of
    calls; arguments then are not restricted if the format cannot enforce their schema. Raises
    RequestError for an invalid or unenforceable schema.
    """
    lark = Lark(added)
    try:
        start = format.calls(lark, tools, parallel=parallel) if format and tools else ""
    except (AttributeError, LookupError, RecursionError, TypeError) as error:
        raise RequestError(
            f"tools: a schema of {', '.join(tool.name for tool in tools)[:200]} is not valid "
            f"({type(error).__name__})",
            "Send JSON Schemas.",
        ) from error
    except RequestError:
        if answer is None:
            raise
        free = [Tool(tool.name, _any_values(tool.schema)) for tool in tools]
        return grammar(
            format, free, tags, added, parallel=parallel, thinking=thinking, answer=answer
        )
    if answer is not None:
        body = lark.answer(answer)
        if format is HARMONY:
            body = harmony.final(lark, body)
        start = f"({start} | {body})" if start else body
    if tags:
        thought = f"{lark.up_to(tags.close)} /[ \\n]{{0,4}}/"
        if not thinking:
            label = f" {lark.text(tags.label)}" if tags.label else ""
            thought = f"({lark.marker(tags.open)}{label} {thought})?"
        start = f"{thought} {start}"
    return lark.grammar(start)


def _any_values(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {key: {} for key in schema.get("properties", {})}}

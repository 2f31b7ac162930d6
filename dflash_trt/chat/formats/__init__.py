"""Formats of reasoning, content and calls in answers: one file each, chosen by probing."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from dflash_trt.chat.formats import (
    gemma,
    harmony,
    hermes,
    kimi,
    llama,
    minimax,
    mistral,
    qwen_coder,
)
from dflash_trt.chat.formats.definitions import Tool, parse_tools, required_tools
from dflash_trt.chat.formats.lark import Lark
from dflash_trt.chat.formats.reader import (
    AnswerDelta,
    AnswerPart,
    CallDelta,
    ContentDelta,
    Reader,
    ReasoningDelta,
    Span,
    Steps,
)
from dflash_trt.errors import RequestError


@dataclass(frozen=True)
class Format:
    name: str  # of vLLM's parser
    sign: str  # occurs in every call of this format
    markers: tuple[str, ...]  # required in the text, special tokens or not
    opens: tuple[str, ...]  # marks that begin a call; none: `read` reads all of an answer
    read: Callable[[Reader, Sequence[Tool]], Steps[None]]  # a call from its mark to its end
    calls: Callable[..., str]  # (lark, tools, parallel=..): grammar of calls
    is_special: bool = True  # its marks are special tokens, which no thought only names
    is_bare: bool = False  # a call may begin an answer without a mark
    # what a call of the tools begins with whose first mark is missing
    starts: Callable[[Sequence[Tool]], tuple[str, ...]] = lambda tools: ()


@dataclass(frozen=True)
class ReasoningTags:
    open: str
    close: str
    label: str = ""  # after `open`
    is_special: bool = True  # they are special tokens, which no text only names


HERMES = Format(
    "hermes",
    hermes.OPEN,
    hermes.MARKERS,
    (hermes.OPEN,),
    hermes.read,
    hermes.calls,
    is_special=False,
    starts=hermes.starts,
)
HARMONY = Format("openai", harmony.OURS, harmony.MARKERS, (), harmony.read, harmony.calls)
_MISTRAL = partial(Format, "mistral", starts=mistral.starts)
_MISTRAL_CALLS = (mistral.MARKERS, (mistral.OPEN,), mistral.read)
FORMATS = (
    Format(
        "qwen3_coder",
        qwen_coder.SIGN,
        qwen_coder.TAGS.markers,
        (qwen_coder.TAGS.open, qwen_coder.TAGS.function),
        qwen_coder.read,
        qwen_coder.calls,
        is_special=False,
    ),
    Format(
        "minimax_m2",
        minimax.SIGN,
        minimax.TAGS.markers,
        (minimax.TAGS.open, minimax.TAGS.function),
        minimax.read,
        minimax.calls,
    ),
    HERMES,
    Format(
        "kimi_k2",
        kimi.ARGUMENTS,
        kimi.MARKERS,
        kimi.OPENS,
        kimi.read,
        kimi.calls,
        starts=kimi.starts,
    ),
    Format(
        "gemma4",
        gemma.OPEN,
        gemma.MARKERS,
        (gemma.OPEN,),
        gemma.read,
        gemma.calls,
        starts=gemma.starts,
    ),
    _MISTRAL(mistral.ID, *_MISTRAL_CALLS, mistral.calls_with_id),
    _MISTRAL(mistral.ARGUMENTS, *_MISTRAL_CALLS, mistral.calls),
    _MISTRAL(mistral.OPEN, *_MISTRAL_CALLS, mistral.list_calls),
    HARMONY,
    Format(
        "llama3_json",
        '"parameters": {',
        llama.MARKERS,
        (llama.TAG,),
        llama.read,
        llama.calls,
        is_bare=True,
    ),
)
REASONING_TAGS = (
    ReasoningTags("<think>", "</think>", is_special=False),
    ReasoningTags("[THINK]", "[/THINK]"),
    ReasoningTags("<|channel>", "<channel|>", "thought\n"),
)
DONE = object()


class AnswerParser:
    """Parses one answer into reasoning, calls and content, incrementally.

    format: None: no calls; thinking: it begins within reasoning, which the prompt opened; begun:
    the text before the answer, which the answer goes on with. Of it only a call that has not
    ended is told again. numbers: of the calls before, where ids count the conversation's.
    """

    def __init__(
        self,
        format: Format | None,
        tools: Sequence[Tool],
        tags: ReasoningTags | None,
        *,
        thinking: bool = False,
        begun: str = "",
        numbers: Iterable[int] = (),
    ) -> None:
        self._reader = Reader()
        self._reader.numbers.update(numbers)
        self._steps = _parse(self._reader, format, tools, tags, thinking)
        if begun:
            self._reader.begin_with(begun, self.push(begun, last=False))

    def push(self, text: str, *, last: bool, cut: bool = False) -> AnswerDelta:
        """Return what a piece adds; cut: the text ended because no more tokens were allowed."""
        self._reader.text += text
        self._reader.ended = last
        self._reader.is_cut = cut
        next(self._steps, None)
        delta = self._reader.delta
        self._reader.delta = AnswerDelta()
        return delta

    @property
    def is_within_call(self) -> bool:
        return self._reader.is_within_call


def _parse(
    reader: Reader,
    format: Format | None,
    tools: Sequence[Tool],
    tags: ReasoningTags | None,
    thinking: bool,
) -> Steps[None]:
    if format and not format.opens:
        yield from format.read(reader, tools)
        yield from reader.add_rest()
        return
    starts = (*format.opens, *format.starts(tools)) if format else ()
    marks = (*starts, tags.open, tags.close) if tags else starts
    if tags and (thinking or (yield from reader.skip_spaced(tags.open))):
        yield from _read_thought(reader, format, tools, tags)
    if format and format.is_bare:
        yield from format.read(reader, tools)
    is_named = False  # a text names the open tag, and so the next closed one
    while marks and (mark := (yield from reader.until(marks, reader.add_content))):
        if format and mark in starts:
            yield from format.read(reader, tools)
        elif tags and mark == tags.open and (tags.is_special or reader.is_fresh):
            yield from _read_thought(reader, format, tools, tags)
        elif tags and not tags.is_special and (mark == tags.open or is_named or reader.names_mark):
            is_named = mark == tags.open
            reader.add_content(reader.take(len(mark)))
        else:  # the end of a thought that is not open
            reader.take(len(mark))
            if reader.is_fresh:
                reader.add_reasoning("")
    yield from reader.add_rest()


def _read_thought(
    reader: Reader, format: Format | None, tools: Sequence[Tool], tags: ReasoningTags
) -> Steps[None]:
    """Read an open thought up to its end, or to a call in it, which is still to be read."""
    reader.begin_thought()
    yield from reader.skip_all(tags.open)
    if tags.label:
        yield from reader.skip_label(tags.label.rstrip())
    opens = format.opens if format else ()
    while mark := (yield from reader.until((tags.close, *opens), reader.add_reasoning)):
        if mark == tags.close:
            yield from reader.skip_all(tags.close)
            break
        assert format is not None
        thought_of = yield from _read_ahead(reader, format, tools, mark, tags.close)
        if thought_of == 0:
            break
        reader.add_reasoning(reader.take(thought_of))
    reader.add_reasoning("")


def _read_ahead(
    reader: Reader, format: Format, tools: Sequence[Tool], mark: str, close: str
) -> Steps[int]:
    """Return how many characters from a call's mark on belong to the thought; 0: it is a call.

    A call ends the thought that it stands in. Where its marks are no special tokens, a thought may
    also tell of one: then the thought's end follows it.
    """
    trial = Reader()
    trial.is_cut = True
    steps = format.read(trial, tools)
    while True:
        trial.text += reader.text[trial.taken + len(trial.text) :]
        trial.ended = reader.ended
        is_read = next(steps, DONE) is DONE
        if trial.calls and format.is_special:
            return 0
        if is_read and not trial.calls:
            return len(mark)
        if is_read:
            after = trial.taken if trial.call_is_whole else len(mark)
            end = reader.text.find(close, after)
            if end >= 0:
                return max(after, len(mark)) if trial.call_is_whole else end
        if not (yield from reader.wait_for_more()):
            return 0


def grammar(
    format: Format | None,
    tools: Sequence[Tool],
    tags: ReasoningTags | None,
    added: Mapping[str, int],
    *,
    parallel: bool,
    thinking: bool,
    is_begun: bool = False,
    answer: Any = None,
    first_call: int = 0,
) -> str:
    """Return an llguidance grammar: reasoning, then one or more calls of the tools.

    added: ids of the tokenizer's added tokens. thinking: it begins within reasoning; is_begun: or
    else within content. answer: JSON schema of a text allowed instead of calls; arguments then are
    not restricted if the format cannot enforce their schema. Raises RequestError for an invalid or
    unenforceable schema. first_call: its number, where ids count the conversation's calls.
    """
    lark = Lark(added, first_call)
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
            format,
            free,
            tags,
            added,
            parallel=parallel,
            thinking=thinking,
            is_begun=is_begun,
            answer=answer,
            first_call=first_call,
        )
    in_text = is_begun and not thinking
    if format is HARMONY and start and in_text:
        start = f"{harmony.next_message(lark)} {start}"
    if answer is not None:
        body = lark.answer(answer)
        if format is HARMONY and not in_text:
            body = harmony.final(lark, body)
        start = f"({start} | {body})" if start else body
    if format is HARMONY and thinking:
        start = f"{harmony.next_message(lark, after_text=True)} {start}"
    if tags and not in_text:
        thought = f"{lark.up_to(tags.close)} /[ \\n]{{0,4}}/"
        if not thinking:
            label = f" {lark.text(tags.label)}" if tags.label else ""
            thought = f"({lark.marker(tags.open)}{label} {thought})?"
        start = f"{thought} {start}"
    return lark.grammar(start)


def _any_values(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {key: {} for key in schema.get("properties", {})}}

"""What a chat template and its tokens tell of a model: how it thinks and calls, what it is told.

Nothing is read from the template's source: it renders small chats, and its text is looked at.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from dflash_trt.chat.arrange import NAME, VALUE, specimen_call
from dflash_trt.chat.formats import (
    FORMATS,
    HARMONY,
    HERMES,
    REASONING_TAGS,
    Answer,
    Format,
    ReasoningTags,
    Tool,
)
from dflash_trt.chat.messages import NAMED, SHORT, THOUGHT, THOUGHTS, Message, with_ids
from dflash_trt.chat.render import Render
from dflash_trt.errors import RequestError

USER, THINKS, SAID = "probe user", "probe thought", "probe said"
SHOWN = "probe_shown"  # the name of a function
CALLED = f"zq{NAME}z"
ARGUMENTS = {"probe_key": f"zq{VALUE}z"}
TOOL = {
    "type": "function",
    "function": {
        "name": SHOWN,
        "description": "Probe.",
        "parameters": {
            "type": "object",
            "properties": {"probe_key": {"type": "string", "description": "Probe."}},
            "required": ["probe_key"],
        },
    },
}
ASKED, SAYS = {"role": "user", "content": USER}, {"role": "assistant", "content": SAID}
REPR = re.compile(r"""['"]thinking['"]:""")  # a list of parts as Python or JSON writes it
# what some templates cannot do without: an empty list of tools; tools and date as texts
EXTRAS: dict[str, Callable[[Sequence[Any]], dict[str, Any]]] = {
    "": lambda tools: {"tools": list(tools) or None},
    "tools": lambda tools: {"tools": list(tools)},
    "functions": lambda tools: {
        "functions": json.dumps(tools, indent=4), "datetime": f"{datetime.now():%b %d %Y %H:%M:%S}"
    },
}  # fmt: skip
PART, IN_TEXT = "a part of the content", "in the text"  # where thoughts are, beside fields


@dataclass(frozen=True)
class Dialect:
    """How a model writes, and in which form its template wants chats with tools.

    format: None where the template writes calls in a form that is not known here.
    """

    format: Format | None = HERMES
    reasoning_tags: ReasoningTags | None = None
    shows_tools: bool = False
    text_arguments: bool = False  # of calls in messages; else they are objects
    ids: str = ""  # the form of calls' ids: `SHORT`, `NAMED` or any
    parts: bool = False  # content is a list of parts
    thoughts: str = ""  # the field that has them, `PART` or `IN_TEXT`; "": none are shown
    extra: str = ""  # what it wants beside the messages: a name of `EXTRAS`


def dialect_of(render: Render | None, added: Mapping[str, int]) -> Dialect:
    """added: ids of the tokenizer's added tokens."""
    tags = next((each for each in REASONING_TAGS if each.close in added), None)
    channels = all(marker in added for marker in HARMONY.markers)
    if render is None:
        return Dialect(HARMONY if channels else HERMES, tags)

    def chat(form: Dialect, *messages: Message, prompt: bool = False, tools: Any = ()) -> str:
        """ "": the template refuses it."""
        values = EXTRAS[form.extra](tools)
        with suppress(RequestError):
            shown = for_template(form, [ASKED, *messages])
            return render(messages=shown, add_generation_prompt=prompt, **values)
        return ""

    forms = (Dialect(extra=extra, parts=parts) for extra in EXTRAS for parts in (False, True))
    form = next((form for form in forms if USER in chat(form)), Dialect())
    text = chat(form, {**SAYS, **dict.fromkeys(THOUGHTS, THINKS)}) + chat(form, prompt=True)
    tags = tags or next((each for each in REASONING_TAGS if each.open in text), None)
    calling = [
        replace(form, text_arguments=as_text, ids=ids)
        for as_text in (False, True)
        for ids in ("", SHORT, NAMED)
    ]
    texts = [chat(each, *_called(each), tools=[TOOL]) for each in calling]
    formats = [_format_of(text.partition(USER)[2]) for text in texts]
    writes = [CALLED in text for text in texts]
    format = next(filter(None, formats), None)
    shows = SHOWN in chat(form, prompt=True, tools=[TOOL])
    if any(writes):
        form = calling[formats.index(format) if format else writes.index(True)]
    if channels:
        format = HARMONY
    elif format is None and not (shows and any(writes)):
        format, shows = HERMES, False
    tags = None if format is HARMONY else tags
    form = replace(form, format=format, reasoning_tags=tags, shows_tools=shows)
    for field in (*THOUGHTS, PART, *([IN_TEXT] if tags else [])):
        tried = replace(form, thoughts=field)
        first, *rest = _called(form)
        chats = [{**first, THOUGHT: THINKS}, *rest], [{**SAYS, THOUGHT: THINKS}]
        text = "".join(chat(tried, *messages) for messages in chats)
        if THINKS in text and not REPR.search(text):
            return tried
    return form


def for_template(dialect: Dialect, messages: Sequence[Message]) -> list[Message]:
    """Return messages with thoughts and text where the template has them."""
    result = []
    last = max((at for at, each in enumerate(messages) if each["role"] == "user"), default=-1)
    for at, each in enumerate(messages):
        thought = each.get(THOUGHT)
        if thought is not None:
            rest = {name: value for name, value in each.items() if name != THOUGHT}
            # templates leave out what was thought before the last question by themselves
            known = dialect.thoughts and (dialect.thoughts != IN_TEXT or at > last)
            each = _with_thought(rest, thought, dialect) if known else rest
        if dialect.parts and isinstance(each["content"], str):
            each = {**each, "content": [{"type": "text", "text": each["content"]}]}
        result.append(each)
    return result


def _with_thought(message: Message, thought: str, dialect: Dialect) -> Message:
    """Return the message with a thought where the template reads it."""
    content, tags = message["content"], dialect.reasoning_tags
    if dialect.thoughts == PART:
        text = [{"type": "text", "text": content}] if content else []
        return {**message, "content": [{"type": "thinking", "thinking": thought}, *text]}
    if dialect.thoughts == IN_TEXT and tags:
        written = f"{tags.open}{tags.label}\n{thought}\n{tags.close}\n\n{content}"
        return {**message, "content": written}
    return {**message, dialect.thoughts: thought}


def _called(form: Dialect) -> list[Message]:
    """A message that calls a function, and what it gave."""
    call = specimen_call(0, form.text_arguments)
    result = {"role": "tool", "tool_call_id": call["id"], "name": CALLED, "content": "1"}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}, result]
    return with_ids(messages, form.ids)


def _format_of(text: str) -> Format | None:
    """The one that reads the call in a text."""
    for format in FORMATS:
        if format.sign in text and any(_reads(format, text[at:]) for at in (0, text.find("{"))):
            return format
    return None


def _reads(format: Format, text: str) -> bool:
    calls = Answer(format, [Tool(CALLED, {})], None).push(text, last=True).calls
    with suppress(ValueError):
        return bool(calls) and (
            calls[0].name == CALLED and json.loads(calls[0].arguments) == ARGUMENTS
        )
    return False

"""What a chat template and its tokens tell of a model: how it thinks and calls, what it is told.

Nothing is read from the template's source: it renders small chats, and its text is looked at.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

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
from dflash_trt.chat.render import Render
from dflash_trt.errors import RequestError

USER, SYSTEM, THOUGHT, SAID = "probe user", "probe system", "probe thought", "probe said"
SHOWN, CALLED, SECOND = "probe_shown", "probe_called", "probe_second"  # names of functions
ARGUMENTS = {"probe_key": "probe value"}
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
ASKED = {"role": "user", "content": USER}


@dataclass(frozen=True)
class Dialect:
    """How a model writes, and in which form its template wants chats with tools.

    format: None where the template writes calls in a form that is not known here.
    """

    format: Format | None = HERMES
    reasoning_tags: ReasoningTags | None = None
    shows_tools: bool = False
    writes_calls: bool = False
    text_arguments: bool = False  # of calls in messages; else they are objects
    one_call: bool = False  # a message has one at most
    system: bool = True  # there may be a system message


def dialect_of(render: Render | None, added: Mapping[str, int]) -> Dialect:
    """added: ids of the tokenizer's added tokens."""
    tags = next((each for each in REASONING_TAGS if each.close in added), None)
    channels = all(marker in added for marker in HARMONY.markers)
    if render is None:
        return Dialect(HARMONY if channels else HERMES, tags)

    def chat(*messages: Mapping[str, Any], prompt: bool = False, **values: Any) -> str:
        """ "": the template refuses it."""
        with suppress(RequestError):
            return render(messages=list(messages), add_generation_prompt=prompt, **values)
        return ""

    thinks = {"role": "assistant", "content": SAID, "reasoning_content": THOUGHT}
    text = chat(ASKED, thinks) + chat(ASKED, prompt=True)
    tags = tags or next((each for each in REASONING_TAGS if each.open in text), None)
    format, texts, writes = None, (False, True), False
    for as_text in texts:
        text = chat(ASKED, *_called(as_text, CALLED), tools=[TOOL])
        writes = writes or CALLED in text
        if format := _format_of(text.partition(USER)[2]):
            break
    two = chat(ASKED, *_called(as_text, CALLED, SECOND), tools=[TOOL])
    shows = SHOWN in chat(ASKED, prompt=True, tools=[TOOL])
    if channels:
        format = HARMONY
    elif format is None and not (shows and writes):
        format, writes = HERMES, False
    return Dialect(
        format=format,
        reasoning_tags=None if format is HARMONY else tags,
        shows_tools=shows,
        writes_calls=writes,
        text_arguments=as_text and writes and format is not None,
        one_call=writes and SECOND not in two,
        system=SYSTEM in chat({"role": "system", "content": SYSTEM}, ASKED),
    )


def _called(as_text: bool, *names: str) -> list[dict[str, Any]]:
    """A message that calls functions, and what they gave."""
    arguments = json.dumps(ARGUMENTS) if as_text else ARGUMENTS
    calls = [
        {
            "id": f"probe{at:04}",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        for at, name in enumerate(names)
    ]
    given = [
        {"role": "tool", "tool_call_id": call["id"], "name": name, "content": "1"}
        for call, name in zip(calls, names, strict=True)
    ]
    return [{"role": "assistant", "content": "", "tool_calls": calls}, *given]


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

"""Dialect of a model, learned by probing its chat template: reasoning, calls and tools.

The template's source is not read: it renders small chats, and their text is inspected.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import count, product
from typing import Any

from dflash_trt.chat import typescript
from dflash_trt.chat.formats import (
    FORMATS,
    HARMONY,
    HERMES,
    REASONING_TAGS,
    AnswerParser,
    Format,
    ReasoningTags,
    Tool,
    kimi,
)
from dflash_trt.chat.formats.reader import ID_CHARACTERS, ID_LENGTH
from dflash_trt.chat.messages import THOUGHT, THOUGHTS, Message, read_messages
from dflash_trt.chat.render import Render
from dflash_trt.chat.specimen import specimen_call
from dflash_trt.errors import RequestError

USER = "probe user"
THINKS = "probe thought"
SHOWN = "probe_shown"  # a function name
CALL = specimen_call(0)
CALLED = CALL["function"]["name"]
ARGUMENTS = CALL["function"]["arguments"]
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
QUESTION: Message = {"role": "user", "content": USER}
ANSWER: Message = {"role": "assistant", "content": "probe said"}
CALLING: Message = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT: Message = {"role": "tool", "tool_call_id": CALL["id"], "name": CALLED, "content": "1"}
REPR = re.compile(r"""['"]thinking['"]:""")  # a list of parts printed by Python or JSON
# arguments that some templates require: an empty list of tools; tools and date as texts
EXTRAS: dict[str, Callable[[Sequence[Any]], dict[str, Any]]] = {
    "": lambda tools: {"tools": list(tools) or None},
    "tools": lambda tools: {"tools": list(tools)},
    "functions": lambda tools: {
        "functions": json.dumps(tools, indent=4), "datetime": f"{datetime.now():%b %d %Y %H:%M:%S}"
    },
}  # fmt: skip
# what turns thinking off and on, by name in published templates; on: None if without the name
THINKING_SWITCHES: dict[str, tuple[Any, Any]] = {
    "enable_thinking": (False, True),  # Qwen3, Gemma 4
    "thinking": (False, True),  # DeepSeek, Granite, Kimi
    "thinking_budget": (0, None),  # Seed-OSS
}
EFFORT = "reasoning_effort"
NO_EFFORT = "none"
UNKNOWN_EFFORT = "probe_effort"
SHOWN_TYPES = "probe_types"
# where reasoning is, if not in a field
PART = "a part of the content"
IN_TEXT = "in the text"


@dataclass(frozen=True)
class Dialect:
    """Writing style of a model, and the form in which its template takes chats with tools."""

    format: Format | None = HERMES  # of calls; None: an unknown one
    reasoning_tags: ReasoningTags | None = None
    shows_tools: bool = False
    text_arguments: bool = False  # of calls in messages; otherwise objects
    short_ids: bool = False  # call ids as Mistral's
    named_ids: bool = False  # call ids as Kimi's, which alone name the function
    typescript: bool = False  # it takes tools as TypeScript, too (`chat.typescript`)
    parts: bool = False  # content is a list of parts
    thoughts: str = ""  # field with reasoning, `PART` or `IN_TEXT`; "": not shown
    extra: str = ""  # further arguments it needs: a key of `EXTRAS`
    switches: tuple[str, ...] = ()  # the keys of `THINKING_SWITCHES` that it reads
    reads_no_effort: bool = False  # it has a prompt of its own for the effort none

    @property
    def thinks(self) -> bool:
        """Whether the model may write thoughts."""
        return self.format is HARMONY or self.reasoning_tags is not None


def dialect_of(render: Render | None, added: Mapping[str, int]) -> Dialect:
    """Probe a template; added: ids of the tokenizer's added tokens."""
    form = _dialect_of(render, added)
    if render is None:
        return form

    def prompt(tools: Sequence[Any] = (), **values: Any) -> str | None:
        with suppress(RequestError):
            messages = convert_for_template(form, [QUESTION])
            extra = EXTRAS[form.extra](tools)
            return render(messages=messages, add_generation_prompt=True, **extra, **values)
        return None

    plain = prompt()
    switches = []
    tags = form.reasoning_tags
    for name, (off, on) in THINKING_SWITCHES.items():
        shown = plain if on is None else prompt(**{name: on})
        if shown not in (prompt(**{name: off}), None):
            switches.append(name)
            if tags is None and form.format is not HARMONY:
                tags = next((tags for tags in REASONING_TAGS if tags.open in (shown or "")), None)
    none = prompt(**{EFFORT: NO_EFFORT})
    unknown = prompt(**{EFFORT: UNKNOWN_EFFORT})
    shown = prompt(tools=[TOOL], **{typescript.ARGUMENT: SHOWN_TYPES}) or ""
    reads_none = none is not None and none not in (plain, unknown)
    if unknown is not None and none == unknown.replace(UNKNOWN_EFFORT, NO_EFFORT):
        reads_none = False  # it writes any word there
    return replace(
        form,
        reasoning_tags=tags,
        switches=tuple(switches),
        reads_no_effort=reads_none,
        typescript=SHOWN_TYPES in shown,
    )


def with_effort(form: Dialect, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a template's values with those that turn thinking off or on as the effort says.

    A switch that is among the values stays. RequestError if thinking cannot be turned off.
    """
    effort = values.get(EFFORT)
    if not effort or values.keys() & THINKING_SWITCHES.keys():
        return dict(values)
    turned: dict[str, Any] = {}
    for name in form.switches:
        off, on = THINKING_SWITCHES[name]
        value = off if effort == NO_EFFORT else on
        if value is not None:
            turned[name] = value
    if effort == NO_EFFORT and form.thinks and not (turned or form.reads_no_effort):
        raise RequestError(
            f"{EFFORT} is {NO_EFFORT!r}, and this model's chat template cannot turn thinking off",
            "Send another effort.",
        )
    return {**values, **turned}


def _dialect_of(render: Render | None, added: Mapping[str, int]) -> Dialect:
    tags = next((tags for tags in REASONING_TAGS if tags.close in added), None)
    channels = all(marker in added for marker in HARMONY.markers)
    if render is None:
        return Dialect(HARMONY if channels else HERMES, tags)

    def rendered(form: Dialect, *messages: Message, prompt: bool = False, tools: Any = ()) -> str:
        values = EXTRAS[form.extra](tools)
        with suppress(RequestError):
            shown = convert_for_template(form, [QUESTION, *messages])
            return render(messages=shown, add_generation_prompt=prompt, **values)
        return ""

    forms = (Dialect(extra=extra, parts=parts) for extra in EXTRAS for parts in (False, True))
    form = next((form for form in forms if USER in rendered(form)), Dialect())
    thinking = {**ANSWER, **dict.fromkeys(THOUGHTS, THINKS)}
    text = rendered(replace(form, thoughts=THOUGHT), thinking) + rendered(form, prompt=True)
    tags = tags or next((tags for tags in REASONING_TAGS if tags.open in text), None)
    if channels:
        tags = None
    call_forms = [
        replace(form, text_arguments=as_text, short_ids=short)
        for as_text, short in product((False, True), repeat=2)
    ]
    call_forms += [
        replace(form, text_arguments=as_text, named_ids=True) for as_text in (False, True)
    ]
    texts = [rendered(call_form, CALLING, RESULT, tools=[TOOL]) for call_form in call_forms]
    formats = [_format_that_parses(text.partition(USER)[2]) for text in texts]
    writes = [CALLED in text for text in texts]
    format = HARMONY if channels else next(filter(None, formats), None)
    shows = SHOWN in rendered(form, prompt=True, tools=[TOOL])
    if any(writes):
        form = call_forms[[*map(bool, formats), *writes].index(True) % len(writes)]
    if format is None and not (shows and any(writes)):
        format = HERMES
    form = replace(form, format=format, reasoning_tags=tags, shows_tools=shows)
    places = [*THOUGHTS, PART]
    if tags:
        places.append(IN_TEXT)
    for place in places:
        tried = replace(form, thoughts=place)
        calling = {**CALLING, THOUGHT: THINKS}
        text = rendered(tried, calling, RESULT) + rendered(tried, {**ANSWER, THOUGHT: THINKS})
        if THINKS in text and not REPR.search(text):
            return tried
    return form


def convert_for_template(form: Dialect, messages: Sequence[Message]) -> list[Message]:
    if form.named_ids:
        messages = _with_named_ids(messages)
    last_user = -1
    for index, message in enumerate(messages):
        if message["role"] == "user":
            last_user = index
    # templates drop reasoning before the last question anyway
    return [
        _convert_message(form, message, thinks_in_text=index > last_user)
        for index, message in enumerate(messages)
    ]


def _convert_message(form: Dialect, message: Message, *, thinks_in_text: bool) -> Message:
    result = dict(message)
    if "tool_calls" in result:
        result["tool_calls"] = [_convert_call(form, call) for call in result["tool_calls"]]
    if form.short_ids and "tool_call_id" in result:
        result["tool_call_id"] = _short_id(str(result["tool_call_id"]))
    text = result["content"]
    thought = result.pop(THOUGHT, None)
    tags = form.reasoning_tags
    if form.parts or (thought and form.thoughts == PART):
        result["content"] = [{"type": "text", "text": text}] if text or not thought else []
    if not thought:
        return result
    if form.thoughts == PART:
        result["content"].insert(0, {"type": "thinking", "thinking": thought})
    elif form.thoughts == IN_TEXT and tags and thinks_in_text:
        result["content"] = f"{tags.open}{tags.label}\n{thought}\n{tags.close}\n\n{text}"
    elif form.thoughts in THOUGHTS:
        result[form.thoughts] = thought
    return result


def _convert_call(form: Dialect, call: Mapping[str, Any]) -> dict[str, Any]:
    result = {**call, "function": dict(call["function"])}
    arguments = call["function"]["arguments"]
    if form.text_arguments and not isinstance(arguments, str):
        result["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)
    if form.short_ids:
        result["id"] = _short_id(call["id"])
    return result


def _short_id(name: str) -> str:
    if len(name) == ID_LENGTH and set(name) <= set(ID_CHARACTERS):
        return name
    digest = hashlib.sha256(name.encode()).digest()[:ID_LENGTH]
    return "".join(ID_CHARACTERS[byte % len(ID_CHARACTERS)] for byte in digest)


def _with_named_ids(messages: Sequence[Message]) -> list[Message]:
    """Give all calls and results ids as Kimi's: those that have this form keep it."""
    ids = iter(named_ids(messages))
    known: dict[str, str] = {}  # what was sent: as the template is to show it
    result = []
    for message in messages:
        shown = dict(message)
        if "tool_calls" in shown:
            shown["tool_calls"] = [{**call, "id": next(ids)} for call in shown["tool_calls"]]
            for call, before in zip(shown["tool_calls"], message["tool_calls"], strict=True):
                known[before["id"]] = call["id"]
        sent = str(shown.get("tool_call_id", ""))
        if sent in known:
            shown["tool_call_id"] = known[sent]
        result.append(shown)
    return result


def call_numbers(form: Dialect, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the numbers in the ids of a conversation's calls; none where ids have none."""
    if not form.named_ids:
        return []
    ids = named_ids(read_messages(messages))
    return [int(sent.rpartition(":")[2]) for sent in ids]


def named_ids(messages: Sequence[Message]) -> list[str]:
    """Return the ids of a conversation's calls as Kimi's template takes them."""
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    names = [call["function"]["name"] for call in calls]
    taken: dict[int, int] = {}  # numbers: the calls that have them
    for index, (call, name) in enumerate(zip(calls, names, strict=True)):
        number = kimi.number_of(call["id"], name)
        if number is not None:
            taken.setdefault(number, index)
    numbers = {index: number for number, index in taken.items()}
    for index in range(len(calls)):
        if index not in numbers:
            numbers[index] = next(number for number in count(index) if number not in taken)
            taken[numbers[index]] = index
    return [kimi.call_id(name, numbers[index]) for index, name in enumerate(names)]


def _format_that_parses(text: str) -> Format | None:
    for format in FORMATS:
        if format.sign not in text:
            continue
        if _parses(format, text) or _parses(format, text[text.find("{") :]):
            return format
    return None


def _parses(format: Format, text: str) -> bool:
    calls = AnswerParser(format, [Tool(CALLED, {})], None).push(text, last=True).calls
    with suppress(ValueError):
        return bool(calls) and (
            calls[0].name == CALLED and json.loads(calls[0].arguments) == ARGUMENTS
        )
    return False

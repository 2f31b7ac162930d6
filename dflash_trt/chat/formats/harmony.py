"""OpenAI's harmony format of gpt-oss: channels for reasoning, content and calls.

For example
`<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello`:
https://github.com/openai/harmony. The model's text keeps its markers; chat endpoints parse them.
"""

import re
from collections.abc import Sequence

from tokenizers import Tokenizer

from dflash_trt.chat.formats.definitions import NAME, Tool
from dflash_trt.chat.formats.lark import Lark
from dflash_trt.chat.formats.reader import Reader, Steps

START = "<|start|>"
CHANNEL = "<|channel|>"
MESSAGE = "<|message|>"
END = "<|end|>"
CALL = "<|call|>"
KIND = "<|constrain|>"
MARKERS = (START, CHANNEL, MESSAGE, END)
REASONING = "analysis"
RECIPIENT = re.compile(r"(?:^|\s)to=([^\s<]+)")
CHANNEL_NAME = re.compile(r"\s*[^\s<]*")
ROLE = "assistant"
OURS = "functions."  # precedes the name of a request's tool


def has_channels(tokenizer: Tokenizer) -> bool:
    return all(tokenizer.token_to_id(marker) is not None for marker in MARKERS)


def read(reader: Reader, tools: Sequence[Tool]) -> Steps[None]:
    """Parse channels; without tools a call is content, header included."""
    pieces: list[str] = []
    mark = yield from reader.until((MESSAGE, START, CHANNEL, END, CALL), pieces.append)
    if mark is None:  # no channels after all
        reader.add_content("".join(pieces))
        return
    while mark is not None:
        mark = yield from _header(reader, pieces)
        header = "".join(pieces)
        pieces.clear()
        if mark == MESSAGE:
            while (yield from reader.skip_spaced(MESSAGE)):
                pass
            mark = yield from _message(reader, tools, header)
        else:
            _end_header(reader, tools, header)
        while mark in (END, CALL):
            reader.take(len(mark))
            mark = yield from reader.until((START, CHANNEL, MESSAGE, END, CALL), pieces.append)
            if mark in (CHANNEL, MESSAGE):
                break
            text = "".join(pieces)
            pieces.clear()
            if text.strip() != ROLE:
                reader.add_content(text)


def _header(reader: Reader, pieces: list[str]) -> Steps[str | None]:
    """Collect a message's header; return the mark after it."""
    mark = yield from reader.until((MESSAGE, START, CHANNEL, END, CALL), pieces.append)
    while mark in (START, CHANNEL):
        name = ""
        if CHANNEL in "".join(pieces):
            name = CHANNEL_NAME.sub("", "".join(pieces).rpartition(CHANNEL)[2])
        if name.strip():
            break  # a text whose mark is missing
        pieces.append(reader.take(len(mark)))
        mark = yield from reader.until((MESSAGE, START, CHANNEL, END, CALL), pieces.append)
    return mark


def _end_header(reader: Reader, tools: Sequence[Tool], header: str) -> None:
    """Pass on the text or arguments that a header ends with, where the mark before is missing."""
    head, bracket, arguments = header.partition("{")
    called = _called(head, tools)
    if bracket and called:
        reader.begin_call(called)
        reader.add_arguments(bracket + arguments)
        reader.end_arguments()
        return
    _, channel, rest = header.rpartition(CHANNEL)
    if not channel:
        reader.add_content("" if START in header else header)
        return
    name = CHANNEL_NAME.match(rest)
    text = rest[name.end() :] if name else rest
    is_thought = name is not None and name[0].strip() == REASONING
    (reader.add_reasoning if is_thought else reader.add_content)(text)


def _called(header: str, tools: Sequence[Tool]) -> str:
    """Return the function that a header calls, "" if none."""
    to = RECIPIENT.search(header)
    if not to or not tools:
        return ""
    name = to[1].removeprefix(OURS)
    is_ours = name != to[1] or name in {tool.name for tool in tools}
    return name if is_ours and NAME.fullmatch(name) else ""


def _message(reader: Reader, tools: Sequence[Tool], header: str) -> Steps[str | None]:
    """Read a message behind its header; return the mark that ends it."""
    to = RECIPIENT.search(header)
    called = _called(header, tools)
    if called:
        yield from reader.attempt(_call(reader, header, called))
    elif to:
        reader.add_content(header + MESSAGE)
    name = CHANNEL_NAME.match(header.rpartition(CHANNEL)[2])
    thinks = not to and name and name[0].strip() == REASONING
    give = reader.add_reasoning if thinks else reader.add_content
    return (yield from reader.until((START, CHANNEL, END, CALL), give))


def _call(reader: Reader, header: str, name: str) -> Steps[None]:
    reader.restore(header + MESSAGE)
    yield from reader.skip_space()
    is_empty = not reader.text
    for mark in (CALL, END, START):
        is_empty = is_empty or (yield from reader.starts_with(mark))
    if is_empty:
        reader.begin_empty_call(name)
    else:
        yield from reader.json_arguments(name)


def calls(lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
    """Return the grammar of reasoning, then one call, which ends the turn."""
    functions = []
    for tool in tools:
        recipient = lark.text(f"commentary to={OURS}{tool.name} ")
        kind = f'{lark.marker(KIND)} "json"'
        functions.append(f"{recipient} {kind} {lark.marker(MESSAGE)} {lark.json(tool.schema)}")
    return f"{_thoughts(lark)} {lark.marker(CHANNEL)} ({' | '.join(functions)})"


def final(lark: Lark, answer: str) -> str:
    kind = f'(" "? {lark.marker(KIND)} "json")?'
    head = f'{lark.marker(CHANNEL)} "final" {kind} {lark.marker(MESSAGE)}'
    return f"{_thoughts(lark)} {head} {answer}"


def next_message(lark: Lark, *, after_text: bool = False) -> str:
    """Return the rule of what ends a message, and text of it before, up to the next channel."""
    end = lark.up_to(END) if after_text else lark.marker(END)
    return f'{end} {lark.marker(START)} "{ROLE}"'


def _thoughts(lark: Lark) -> str:
    head = f'{lark.marker(CHANNEL)} "{REASONING}" {lark.marker(MESSAGE)}'
    thought = lark.rule("thought", f"{head} {next_message(lark, after_text=True)}")
    return f"{thought}*"

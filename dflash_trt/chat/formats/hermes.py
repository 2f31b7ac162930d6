"""Hermes, Qwen2.5 and Qwen3: `<tool_call>{"name": .., "arguments": {..}}</tool_call>`.

Also requested from models whose template has no tools.
"""

from collections.abc import Sequence

from dflash_trt.chat.formats.definitions import Tool
from dflash_trt.chat.formats.lark import Lark, json_calls
from dflash_trt.chat.formats.reader import BrokenError, Reader, Steps, as_json, json_call

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
MARKERS = (OPEN, CLOSE)


def starts(tools: Sequence[Tool]) -> tuple[str, ...]:
    """Return what a call begins with whose first mark is missing."""
    names = [as_json(tool.name) for tool in tools]
    return tuple(f'{{"name":{space}{name}' for name in names for space in ("", " "))


def read(reader: Reader, tools: Sequence[Tool]) -> Steps[None]:
    is_marked = yield from reader.starts_with(OPEN)
    if not is_marked and not (yield from _is_closed(reader)):
        reader.add_content(reader.take(1))
        return
    if (yield from reader.attempt(_call(reader))):
        while (yield from reader.attempt(_next_call(reader))):
            pass
        yield from reader.skip_spaced("]")
        yield from reader.close(CLOSE)


def _is_closed(reader: Reader) -> Steps[bool]:
    """Return whether a call follows, and the last mark after it."""
    trial = Reader()
    steps = _closed_call(trial)
    while True:
        trial.text += reader.text[trial.taken + len(trial.text) :]
        trial.ended = reader.ended
        try:
            next(steps)
        except StopIteration as done:
            return bool(done.value)
        yield


def _closed_call(reader: Reader) -> Steps[bool]:
    try:
        yield from json_call(reader)
    except BrokenError:
        return False
    return (yield from reader.skip_spaced(CLOSE))


def _call(reader: Reader) -> Steps[None]:
    yield from reader.skip_all(OPEN)
    yield from reader.skip_space()
    yield from reader.skip("[")
    yield from reader.skip_space()
    yield from json_call(reader)


def _next_call(reader: Reader) -> Steps[None]:
    yield from reader.skip_space()
    yield from reader.skip(",")
    yield from reader.skip_space()
    yield from json_call(reader)


def calls(lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
    body = json_calls(lark, tools, "arguments")
    call = lark.rule("call", f'{lark.marker(OPEN)} "\\n" {body} "\\n" {lark.marker(CLOSE)}')
    return f'{call} ("\\n" {call})*' if parallel else call

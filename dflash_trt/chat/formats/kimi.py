"""Kimi K2: calls in a section, each `functions.name:0` before its arguments, a JSON object.

That id is the only place of the function's name; its number counts the conversation's calls.
Moonshot's docs/tool_call_guidance.md; vLLM's `kimi_k2` knows the section's other spelling.
"""

import re
from collections.abc import Collection, Sequence

from dflash_trt.chat.formats.definitions import NAME, Tool
from dflash_trt.chat.formats.lark import Lark
from dflash_trt.chat.formats.reader import BrokenError, Reader, Steps

SECTION = "<|tool_calls_section_begin|>"
END_SECTION = "<|tool_calls_section_end|>"
OPEN = "<|tool_call_begin|>"
ARGUMENTS = "<|tool_call_argument_begin|>"
CLOSE = "<|tool_call_end|>"
MARKERS = (SECTION, END_SECTION, OPEN, ARGUMENTS, CLOSE)
SECTIONS = (SECTION, "<|tool_call_section_begin|>")
END_SECTIONS = (END_SECTION, "<|tool_call_section_end|>")
OPENS = (*SECTIONS, OPEN)
ALL = (*SECTIONS, *END_SECTIONS, OPEN, ARGUMENTS, CLOSE)
PREFIX = "functions."
COUNTED = 4  # calls of an answer whose numbers a grammar sets
ID = re.compile(r"(?:functions\.)?(?P<name>[^:]+)(?::(?P<number>\d{1,9}))?")
BEGUN_ID = re.compile(r"[\w.-]{0,160}(?::\d{0,9}\s*)?")
WHOLE_ID = re.compile(r"[\w.-]{1,160}:\d{1,9}\s*")


def call_id(name: str, number: int) -> str:
    return f"{PREFIX}{name}:{number}"


def number_of(sent: str, name: str) -> int | None:
    """Return the number of a call's id, if the id has this form and that name."""
    match = ID.fullmatch(sent)
    if match is None or match["number"] is None or sent != call_id(name, int(match["number"])):
        return None
    return int(match["number"])


def next_number(used: Collection[int]) -> int:
    number = len(used)
    while number in used:
        number += 1
    return number


def starts(tools: Sequence[Tool]) -> tuple[str, ...]:
    """Return what a call begins with whose first marks are missing."""
    return tuple(f"{PREFIX}{tool.name}:" for tool in tools)


def read(reader: Reader, tools: Sequence[Tool]) -> Steps[None]:
    names = {tool.name for tool in tools}
    if not (yield from _is_marked(reader)) and not (yield from _is_id(reader)):
        reader.add_content(reader.take(1))
        return
    called = yield from reader.attempt(_call(reader, names))
    while called:
        yield from reader.skip_all(CLOSE)
        if (yield from _skip_any(reader, END_SECTIONS)):
            return
        if not (yield from _is_marked(reader)) and not (yield from _is_id(reader)):
            break
        called = yield from reader.attempt(_call(reader, names))
    if called and reader.ended and _begins_mark(reader.text.lstrip()):
        reader.take(len(reader.text))  # the text was cut there


def _is_marked(reader: Reader) -> Steps[bool]:
    """Return whether a mark that begins a call is next, after white space."""
    while True:
        rest = reader.text.lstrip()
        if rest.startswith(OPENS):
            return True
        if not any(mark.startswith(rest) for mark in OPENS):
            return False
        if not (yield from reader.wait_for_more()):
            return False


def _is_id(reader: Reader) -> Steps[bool]:
    """Return whether an id and the mark of its arguments are next, after white space."""
    while True:
        rest = reader.text.lstrip()
        sent, _, _ = rest.partition("<")
        mark = rest[len(sent) :]
        if WHOLE_ID.fullmatch(sent) and mark.startswith(ARGUMENTS):
            return True
        if not BEGUN_ID.fullmatch(sent) or not ARGUMENTS.startswith(mark):
            return False
        if not (yield from reader.wait_for_more()):
            return False


def _skip_any(reader: Reader, marks: Sequence[str]) -> Steps[bool]:
    """Skip marks as often as they come, spaced; return whether one came."""
    came = False
    again = True
    while again:
        again = False
        for mark in marks:
            again = (yield from reader.skip_all(mark)) or again
        came = came or again
    return came


def _call(reader: Reader, names: Collection[str]) -> Steps[None]:
    yield from _skip_any(reader, OPENS)
    yield from reader.skip_space()
    sent = (yield from reader.collect_until("{", *ALL)).strip()
    name, number = _named(sent, names)
    has_mark = yield from reader.skip_all(ARGUMENTS)
    yield from reader.skip_space()
    if number is None or number in reader.numbers:
        number = next_number(reader.numbers)
        sent = call_id(name, number)
    before = reader.calls
    try:
        if has_mark and (yield from _ends(reader)):
            reader.begin_empty_call(name, sent)
        else:
            yield from reader.json_arguments(name, sent)
    finally:
        if reader.calls > before:
            reader.numbers.add(number)


def _ends(reader: Reader) -> Steps[bool]:
    """Return whether a mark, the beginning of one that was cut, or nothing follows."""
    while not reader.text.startswith(ALL):
        if not _begins_mark(reader.text):
            return False
        if not (yield from reader.wait_for_more()):
            return True
    return True


def _named(sent: str, names: Collection[str]) -> tuple[str, int | None]:
    """Return the name and the number of an id; BrokenError if it names no function."""
    match = ID.fullmatch(sent)
    if match is None or not NAME.fullmatch(match["name"]):
        raise BrokenError
    if match["number"] is None:
        if match["name"] not in names:
            raise BrokenError
        return match["name"], None
    return match["name"], int(match["number"])


def _begins_mark(text: str) -> bool:
    return any(mark.startswith(text) for mark in ALL)


def calls(lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
    arguments = {tool.name: lark.json(tool.schema) for tool in tools}

    def call(number: str) -> str:
        functions = [
            f"{lark.text(f'{PREFIX}{name}:')} {number} {lark.marker(ARGUMENTS)} {rule}"
            for name, rule in arguments.items()
        ]
        return lark.rule(
            "call", f"{lark.marker(OPEN)} ({' | '.join(functions)}) {lark.marker(CLOSE)}"
        )

    several = call(lark.text(str(lark.first_call)))
    if parallel:
        rest = f"{call('/[1-9][0-9]{0,3}/')}*"
        for number in range(lark.first_call + COUNTED - 1, lark.first_call, -1):
            rest = f"({call(lark.text(str(number)))} {rest})?"
        several = f"{several} {rest}"
    return f"{lark.marker(SECTION)} {several} {lark.marker(END_SECTION)}"

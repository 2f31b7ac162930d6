"""Hermes, Qwen2.5 and Qwen3: `<tool_call>{"name": .., "arguments": {..}}</tool_call>`.

Also requested from models whose template has no tools.
"""

from collections.abc import Sequence

from dflash_trt.chat.formats.definitions import Tool
from dflash_trt.chat.formats.lark import Lark, json_calls
from dflash_trt.chat.formats.reader import Reader, Steps, json_call

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
MARKERS = (OPEN, CLOSE)


def read(reader: Reader, tools: Sequence[Tool]) -> Steps[None]:
    if (yield from reader.attempt(_call(reader))):
        yield from reader.close(CLOSE)


def _call(reader: Reader) -> Steps[None]:
    yield from reader.skip_all(OPEN)
    yield from reader.skip_space()
    yield from json_call(reader)


def calls(lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
    body = json_calls(lark, tools, "arguments")
    call = lark.rule("call", f'{lark.marker(OPEN)} "\\n" {body} "\\n" {lark.marker(CLOSE)}')
    return f'{call} ("\\n" {call})*' if parallel else call

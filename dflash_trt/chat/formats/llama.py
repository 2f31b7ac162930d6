"""Llama 3: `{"name": .., "parameters": {..}}` at the start or after `<|python_tag|>`.

Several calls are separated by semicolons, as in vLLM.
"""

from collections.abc import Sequence

from dflash_trt.chat.formats.definitions import Tool
from dflash_trt.chat.formats.lark import Lark, json_calls
from dflash_trt.chat.formats.reader import Reader, Steps, json_call

TAG = "<|python_tag|>"
MARKERS = (TAG,)


def read(reader: Reader, tools: Sequence[Tool]) -> Steps[None]:
    called = yield from reader.attempt(_call(reader))
    while called:
        called = yield from reader.attempt(_call(reader, after=";,"))


def _call(reader: Reader, after: str = "") -> Steps[None]:
    yield from reader.skip_space()
    for separator in after:
        if (yield from reader.skip(separator)):
            yield from reader.skip_space()
            break
    yield from reader.skip_all(TAG)
    yield from reader.skip_space()
    yield from json_call(reader)


def calls(lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
    call = lark.rule("call", json_calls(lark, tools, "parameters"))
    return f'{call} ("; " {call})*' if parallel else call

"""Gemma 4: `<|tool_call>call:name{key:<|"|>text<|"|>,other:1}<tool_call|>`.

Earlier models have no tools. Arguments are converted to JSON as they arrive. No grammar enforces
them: a JSON Schema of values that are not JSON would have to be written anew.
"""

import re
from collections.abc import Sequence

from dflash_trt.chat.formats.definitions import NAME, Tool
from dflash_trt.chat.formats.reader import BrokenError, Reader, Steps, as_json

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
DEEPEST = 64
MARKERS = (OPEN, CLOSE, QUOTE)
WORDS = {"true": "true", "false": "false", "null": "null", "None": "null"}  # Python's too
NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")


def read(reader: Reader, tools: Sequence[Tool]) -> Steps[None]:
    while (yield from reader.until((OPEN,), reader.say)):
        if (yield from reader.attempt(_call(reader))):
            yield from reader.close(CLOSE)


def _call(reader: Reader) -> Steps[None]:
    yield from reader.expect(OPEN)
    yield from reader.expect("call:")
    name = yield from reader.collect("{")
    if not NAME.fullmatch(name):
        raise BrokenError
    reader.begin(name)
    yield from _value(reader)


def _value(reader: Reader, depth: int = 0) -> Steps[None]:
    if depth > DEEPEST:
        raise BrokenError
    while not reader.text:
        yield from reader.need()
    if (yield from reader.skip("{")):
        yield from _items(reader, "{}", depth)
    elif (yield from reader.skip("[")):
        yield from _items(reader, "[]", depth)
    elif (yield from reader.skip(QUOTE)):
        reader.argue('"')
        yield from reader.until((QUOTE,), lambda piece: reader.argue(as_json(piece)[1:-1]))
        yield from reader.expect(QUOTE)
        reader.argue('"')
    else:
        word = (yield from reader.collect(",", "}", "]")).strip()
        if not word:
            raise BrokenError
        number = NUMBER.fullmatch(word)
        reader.argue(word if number else WORDS.get(word) or as_json(word))


def _items(reader: Reader, brackets: str, depth: int) -> Steps[None]:
    reader.argue(brackets[0])
    first = True
    while True:
        yield from reader.space()
        if (yield from reader.skip(brackets[1])):
            break
        if not first:
            yield from reader.expect(",")
            yield from reader.space()
            reader.argue(", ")
        first = False
        if brackets == "{}":
            quoted = yield from reader.skip(QUOTE)
            key = yield from reader.collect(QUOTE if quoted else ":")
            if quoted:
                yield from reader.expect(QUOTE)
            yield from reader.expect(":")
            reader.argue(as_json(key.strip()) + ": ")
            yield from reader.space()
        yield from _value(reader, depth + 1)
    reader.argue(brackets[1])

"""Calls in tags, with a tag for each argument: Qwen3-Coder's and MiniMax's.

A value of type string is written literally, others as JSON.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from dflash_trt.chat.formats.definitions import NAME, Tool
from dflash_trt.chat.formats.lark import Lark, not_enforceable, refuse_others
from dflash_trt.chat.formats.reader import BrokenError, Reader, Steps, as_json, json_call, overlap
from dflash_trt.chat.formats.schemas import (
    Schema,
    branches,
    properties_of,
    property_schema,
    required_of,
    types_of,
)
from dflash_trt.files import parse_json


class Tags:
    """The tags of a format; `function` and `parameter` end before a name.

    quote: around names; line_end: of a value's own lines, "" where it begins right after its tag;
    shared: one open tag holds several calls.
    """

    def __init__(
        self,
        open: str,
        close: str,
        function: str,
        end: str,
        parameter: str,
        end_value: str,
        *,
        quote: str = "",
        line_end: str = "\n",
        shared: bool = False,
    ) -> None:
        self.open = open
        self.close = close
        self.function = function
        self.end = end
        self.parameter = parameter
        self.end_value = end_value
        self.quote = quote
        self.line_end = line_end
        self.shared = shared
        self.markers = (open, close)
        self.all = (open, close, function, end, parameter, end_value)
        self.pattern = re.compile("|".join(self.all))


QUOTES = "\"'"
KEY = re.compile(r"[^<>\n]*")
WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}  # Python's too


def read(tags: Tags, reader: Reader, tools: Sequence[Tool]) -> Steps[None]:
    schemas = {tool.name: tool.schema for tool in tools}
    if (yield from reader.attempt(_call(tags, reader, schemas))):
        yield from reader.close(tags.close)


def _call(tags: Tags, reader: Reader, schemas: Mapping[str, Schema]) -> Steps[None]:
    yield from reader.skip_all(tags.open)
    yield from reader.skip_space()
    if (yield from reader.starts_with("{")):  # as Hermes
        yield from json_call(reader)
        return
    yield from reader.expect(tags.function)
    name = (yield from reader.collect_until(">")).strip().strip(QUOTES)
    if not NAME.fullmatch(name):
        raise BrokenError
    yield from reader.expect(">")
    reader.begin_call(name)
    reader.add_arguments("{")
    schema = schemas.get(name, {})
    names = properties_of(schema).keys()
    given: set[str] = set()
    while (yield from _skip_to_parameter(tags, reader)):
        key = (yield from reader.collect_until(">", "\n", "<")).strip().strip(QUOTES)
        yield from reader.expect(">")
        separator = ", " if given else ""
        reader.add_arguments(f"{separator}{as_json(key)}: ")
        given.add(key)
        line_end = ""
        for end in ("\r\n", "\n"):
            if not line_end and (yield from reader.skip(end)):
                line_end = end
        place = _Place(tags, names - given, line_end)
        yield from _value(reader, property_schema(schema, key, schema), schema, place)
    rest = reader.text
    ends = (tags.parameter, tags.end)
    if reader.ended and rest != tags.end and any(word.startswith(rest) for word in ends):
        reader.take(len(rest))  # cut, in a mark at most
        return
    reader.add_arguments("}")
    yield from reader.skip_all(tags.end)


def _skip_to_parameter(tags: Tags, reader: Reader) -> Steps[bool]:
    """Skip what ends a value, and text that belongs to none; return whether a parameter follows."""
    yield from reader.skip_all(tags.end_value)
    yield from reader.skip_space()
    mark = tags.pattern.search(reader.text)
    while mark is None and (yield from reader.wait_for_more()):
        mark = tags.pattern.search(reader.text)
    if mark is None or mark[0] not in (tags.parameter, tags.end, tags.close):
        return False
    reader.take(mark.start())
    return (yield from reader.skip(tags.parameter))


def _value(reader: Reader, schema: Any, root: Schema, place: "_Place") -> Steps[None]:
    kinds = _kinds(schema, root)
    if kinds == {"string"}:
        reader.add_arguments('"')
        yield from _literal(reader, place, lambda piece: reader.add_arguments(as_json(piece)[1:-1]))
        reader.add_arguments('"')
        return
    pieces: list[str] = []
    yield from _literal(reader, place, pieces.append)
    reader.add_arguments(_value_as_json("".join(pieces), kinds))


def _literal(reader: Reader, place: "_Place", give: Callable[[str], object]) -> Steps[None]:
    """Pass on a value without the line break before its end, which is not consumed."""
    line_end = place.line_end or place.tags.line_end
    held = ""  # of a line's end
    passed = 0  # characters of the value

    def hold(piece: str) -> None:
        nonlocal held, passed
        passed += len(piece)
        piece = held + piece
        size = len(line_end) if piece.endswith(line_end) else overlap(piece, line_end)
        held = piece[len(piece) - size :]
        give(piece[: len(piece) - size])

    while (yield from reader.until(place.tags.all, hold, keep_begun=True)):
        after_line = held == line_end or not passed
        while True:
            try:
                read = _read_mark(reader.text, reader.ended, after_line, place)
                break
            except _NeedsMoreError:
                yield from reader.require_more()
        if read == 0:
            give("" if held == line_end else held)
            return
        hold(reader.take(read))
    reader.take(len(reader.text))  # of a mark
    give("" if held == line_end else held)
    if reader.is_cut:
        raise BrokenError


class _NeedsMoreError(Exception):
    """What a mark is depends on text that has not come yet."""


class _Place(NamedTuple):
    """Where a value is."""

    tags: Tags
    names: Collection[str]  # of parameters that have no value yet; none: of any
    line_end: str  # before the value, which then has lines of its own


class _Ahead:
    """The text from a mark within a value on."""

    def __init__(self, tags: Tags, text: str, ended: bool) -> None:
        self.tags = tags
        self.text = text
        self._ended = ended

    def mark(self, start: int) -> re.Match[str] | None:
        """Return the next mark."""
        match = self.tags.pattern.search(self.text, start)
        if match is None and not self._ended:
            raise _NeedsMoreError
        return match

    def directly(self, start: int) -> re.Match[str] | None:
        """Return the mark that follows with nothing but white space before it."""
        rest = self.text[start:].lstrip()
        begin = len(self.text) - len(rest)
        match = self.tags.pattern.match(self.text, begin)
        begun = any(word.startswith(rest) for word in self.tags.all)
        if match is None and begun and not self._ended:
            raise _NeedsMoreError
        return match

    def is_end(self, start: int) -> bool:
        """Return whether nothing but white space follows."""
        if self.text[start:].strip():
            return False
        if not self._ended:
            raise _NeedsMoreError
        return True

    def key(self, start: int) -> tuple[str, int]:
        """Return the name up to a `>` in the same line, and where it ends."""
        match = KEY.match(self.text, start)
        if match is None:
            raise _NeedsMoreError
        if match.end() == len(self.text) and not self._ended:
            raise _NeedsMoreError
        if self.text[match.end() : match.end() + 1] != ">":
            return "", start
        return match[0].strip().strip(QUOTES), match.end() + 1


def _read_mark(text: str, ended: bool, after_line: bool, place: _Place) -> int:
    """Return how many characters from a mark on belong to the value; 0: the mark ends it.

    A model leaves marks out and writes them in values. What follows tells: the value's end is
    followed by another mark or nothing, and a mark within a value by more text and the end.
    """
    tags = place.tags
    ahead = _Ahead(tags, text, ended)
    mark = tags.pattern.match(text)
    assert mark is not None
    if mark[0] == tags.end_value:
        return 0 if _ends_value(ahead, mark.end(), place) else mark.end()
    if mark[0] == tags.parameter:
        return _begins_parameter(ahead, mark.end(), after_line, place)
    if mark[0] in (tags.end, tags.close):
        return 0 if _ends_call(ahead, mark) else mark.end()
    return _begins_call(ahead, mark)


def _ends_value(ahead: _Ahead, after: int, place: _Place) -> bool:
    if ahead.is_end(after) or ahead.directly(after):
        return True
    start = after
    while following := ahead.mark(start):  # of a text that stands between
        if following[0] == ahead.tags.end_value:
            return False
        if following[0] == ahead.tags.parameter:
            lines = ahead.text[start : following.start()]
            after_line = lines.endswith("\n")
            within = _begins_parameter(ahead, following.end(), after_line, place, following.start())
            if within == 0:
                return True
            start = following.start() + within
        else:
            return True
    return True


def _begins_parameter(
    ahead: _Ahead, after: int, after_line: bool, place: _Place, begin: int = 0
) -> int:
    """Return the length of a mark of a parameter within a value; 0: it is the next parameter."""
    tags = ahead.tags
    key, start = ahead.key(after)
    within = after - begin
    if not key:
        return within
    is_known = not place.names or key in place.names
    following = ahead.mark(start)
    if following is None or following[0] != tags.end_value:
        return 0 if is_known else within
    if not ahead.is_end(following.end()):
        beyond = ahead.directly(following.end())
        if beyond is None:
            return within
        if beyond[0] == tags.end_value:  # one parameter within the other
            return following.end() - begin
        named_again = beyond[0] == tags.parameter and ahead.key(beyond.end())[0] == key
        if named_again and not tags.line_end:
            return within
    if not is_known:
        return within
    text = ahead.text[start : following.start()]
    has_lines = text.startswith(("\n", "\r\n"))
    if has_lines or not place.line_end or (after_line and "\n" not in text):
        return 0
    return within


def _ends_call(ahead: _Ahead, mark: re.Match[str]) -> bool:
    after = mark.end()
    tags = ahead.tags
    is_closed = mark[0] == tags.close
    while (directly := ahead.directly(after)) and directly[0] in (tags.end, tags.close):
        is_closed = True
        after = directly.end()
    if directly is not None:
        return directly[0] != tags.end_value
    if ahead.is_end(after):
        return True
    following = ahead.mark(after)
    if following is None or following[0] in (tags.open, tags.function):
        return True
    return is_closed and following[0] in (tags.end, tags.close)


def _begins_call(ahead: _Ahead, mark: re.Match[str]) -> int:
    """Return the length of a call within a value, or of its mark; 0: it is the next call."""
    tags = ahead.tags
    after = mark.end()
    if mark[0] == tags.open:
        function = ahead.directly(after)
        if function is None or function[0] != tags.function:
            return after
        after = function.end()
    following = ahead.mark(after)
    if following is not None and following[0] == tags.end_value:
        return after  # only named
    while following is not None and following[0] not in (tags.end, tags.open, tags.function):
        following = ahead.mark(following.end())
    if following is None or following[0] != tags.end:
        return 0
    after = following.end()
    while (directly := ahead.directly(after)) and directly[0] in (tags.end, tags.close):
        after = directly.end()
    return after if directly is not None and directly[0] == tags.end_value else 0


def _value_as_json(text: str, kinds: set[str]) -> str:
    """Return a value as JSON: a string if it is not valid JSON."""
    word = text.strip()
    if "string" in kinds:
        is_null = "null" in kinds and word.lower() in ("null", "none")
        return "null" if is_null else as_json(text)
    if word.lower() in WORDS:
        return WORDS[word.lower()]
    with suppress(ValueError):
        parse_json(word, parse_constant=_refuse_constant)
        return word
    return as_json(text)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _kinds(schema: Any, root: Schema) -> set[str]:
    """Return the types of a value; "string" if its schema says none, as in vLLM."""
    return types_of(schema, root) or {"string"}


def calls(tags: Tags, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
    functions = []
    for tool in tools:
        if not isinstance(tool.schema.get("properties", {}), Mapping):
            raise TypeError
        required = required_of(tool.schema)
        values = ""
        for key, schema in properties_of(tool.schema).items():
            rule = _parameter(tags, lark, tool, key, schema)
            values += f" {rule}" if key in required else f" {rule}?"
        start = f"{tags.function}{tags.quote}{tool.name}{tags.quote}>\n"
        functions.append(f"{lark.text(start)}{values} {lark.text(tags.end)}")
    function = f"({' | '.join(functions)})"
    if tags.shared and parallel:
        several = lark.rule("calls", function)
        function = f'{several} ("\\n" {several})*'
    body = f'{lark.marker(tags.open)} "\\n" {function} "\\n" {lark.marker(tags.close)}'
    call = lark.rule("call", body)
    return f'{call} ("\\n" {call})*' if parallel and not tags.shared else call


def _parameter(tags: Tags, lark: Lark, tool: Tool, key: str, schema: Any) -> str:
    start = f"{tags.parameter}{tags.quote}{key}{tags.quote}>{tags.line_end}"
    value = _value_grammar(tags, lark, tool, key, schema)
    return lark.rule("parameter", f'{lark.text(start)} {value} "\\n"')


def _value_grammar(tags: Tags, lark: Lark, tool: Tool, key: str, schema: Any) -> str:
    end = f"{tags.line_end}{tags.end_value}"
    if "string" not in _kinds(schema, tool.schema):
        shared = {
            name: tool.schema[name] for name in ("$defs", "definitions") if name in tool.schema
        }
        return f"{lark.json({**schema, **shared})} {lark.text(end)}"
    if not isinstance(schema, Mapping):
        raise not_enforceable("a schema that is no object", f"{key} of {tool.name}")
    texts: list[str] = []
    for branch in branches(schema, tool.schema):
        constants = [branch["const"]] if "const" in branch else []
        values = branch.get("enum", constants)
        if not values and branch.get("type") == "null":
            values = [None]
        if not values:
            refuse_others(branch, {"type"}, f"{key} of {tool.name}")
            return lark.up_to(tags.end_value)
        texts += ["null" if value is None else value for value in values]
    return f"({' | '.join(lark.text(text + end) for text in texts)})"

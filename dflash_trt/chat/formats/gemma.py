"""Gemma 4: `<|tool_call>call:name{key:<|"|>text<|"|>,other:1}<tool_call|>`.

Earlier models have no tools. Arguments are converted to JSON as they arrive.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_trt.chat.formats.definitions import NAME, Tool
from dflash_trt.chat.formats.lark import Lark, not_enforceable, refuse_others
from dflash_trt.chat.formats.reader import BrokenError, Reader, Steps, as_json
from dflash_trt.chat.formats.schemas import Schema, item_schema, property_schema, types_of

OPEN = "<|tool_call>"
CLOSE = "<tool_call|>"
QUOTE = '<|"|>'
DEEPEST = 64
MARKERS = (OPEN, CLOSE, QUOTE)
WORDS = {"true": "true", "false": "false", "null": "null", "None": "null"}  # Python's too
BEHIND = re.compile(r"[}\]\s]*(?:,\s*[\w.-]*\s*:?\s*)?$")
NEXT_KEY = re.compile(r"[}\]\s]*,\s*[\w.-]+\s*:\s*")
BRACKETS = re.compile(r"[}\]\s]*$")
ENDS_VALUE = ",:}]<"  # the last: of a mark
NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
# of a grammar
PLAIN = {
    "integer": "/-?(0|[1-9][0-9]*)/",
    "number": "/-?(0|[1-9][0-9]*)(\\.[0-9]+)?([eE][+-]?[0-9]+)?/",
    "boolean": '("true" | "false")',
    "null": '"null"',
}
KINDS = (*PLAIN, "string", "array", "object")
KEY_PATTERN = "/[A-Za-z_][A-Za-z0-9_-]*/"


def starts(tools: Sequence[Tool]) -> tuple[str, ...]:
    """Return what a call begins with whose first mark is missing."""
    return tuple(f"{comma}call:{tool.name}{{" for tool in tools for comma in ("", ","))


def read(reader: Reader, tools: Sequence[Tool]) -> Steps[None]:
    schemas = {tool.name: tool.schema for tool in tools}
    if (yield from reader.attempt(_call(reader, schemas))):
        yield from reader.close(CLOSE)


def _call(reader: Reader, schemas: Mapping[str, Schema]) -> Steps[None]:
    yield from reader.skip_all(OPEN)
    yield from reader.skip_space()
    yield from reader.skip(",")
    yield from reader.expect("call:")
    name = (yield from reader.collect_until("{", OPEN, CLOSE)).strip()
    if not NAME.fullmatch(name):
        raise BrokenError
    if not (yield from reader.starts_with("{")):
        reader.begin_empty_call(name)
        return
    reader.begin_call(name)
    schema = schemas.get(name, {})
    yield from _value(reader, schema, schema)


def _value(reader: Reader, schema: Any, root: Schema, depth: int = 0) -> Steps[None]:
    if depth > DEEPEST:
        raise BrokenError
    while not reader.text:
        yield from reader.require_more()
    if (yield from reader.skip("{")):
        yield from _items(reader, "{}", schema, root, depth)
    elif (yield from reader.skip("[")):
        yield from _items(reader, "[]", schema, root, depth)
    elif (yield from reader.skip(QUOTE)):
        reader.add_arguments('"')
        yield from _text(reader)
        reader.add_arguments('"')
    else:
        word = (yield from reader.collect_until(",", "}", "]", QUOTE, CLOSE)).strip()
        is_text = yield from reader.skip_all(QUOTE)
        if not word:
            raise BrokenError
        is_text = is_text or types_of(schema, root) == {"string"}
        is_number = NUMBER.fullmatch(word)
        known = word if is_number else WORDS.get(word, "")
        reader.add_arguments(as_json(word) if is_text or not known else known)


def _text(reader: Reader) -> Steps[None]:
    """Read a text behind its first quote, and the last one.

    Where that is missing, the call's end or the next value's first quote tells where it ended.
    """
    held = ""  # may stand behind the text
    is_empty = True

    def give(piece: str) -> None:
        nonlocal held, is_empty
        held += piece
        is_empty = is_empty and not held.strip()
        behind = BEHIND.search(held)
        end = behind.start() if behind else len(held)
        reader.add_arguments(as_json(held[:end])[1:-1])
        held = held[end:]

    while (yield from reader.until((QUOTE, CLOSE), give, keep_begun=True)) == QUOTE:
        is_last = yield from _is_last_quote(reader)
        if not is_last and NEXT_KEY.fullmatch(held):
            reader.put_back(held)
            return
        if is_last or not is_empty:
            reader.add_arguments(as_json(held)[1:-1])
        held = ""
        yield from reader.skip_all(QUOTE)
        if is_last:
            return
    if not reader.text.startswith(CLOSE):
        reader.take(len(reader.text))  # of a mark
    if reader.is_cut and not reader.text:
        reader.add_arguments(as_json(held)[1:-1])
        raise BrokenError
    brackets = BRACKETS.search(held)
    end = brackets.start() if brackets else len(held)
    reader.add_arguments(as_json(held[:end])[1:-1])
    reader.put_back(held[end:])


def _is_last_quote(reader: Reader) -> Steps[bool]:
    """Return whether a value ends with the quotes that come next."""
    while True:
        rest = reader.text
        while rest.startswith(QUOTE):
            rest = rest.removeprefix(QUOTE).lstrip()
        if not QUOTE.startswith(rest):
            return rest[0] in ENDS_VALUE
        if not (yield from reader.wait_for_more()):
            return True


def _items(reader: Reader, brackets: str, schema: Any, root: Schema, depth: int) -> Steps[None]:
    reader.add_arguments(brackets[0])
    first = True
    while True:
        yield from reader.skip_space()
        if (yield from reader.skip(brackets[1])):
            break
        if not first:
            yield from reader.expect(",")
            yield from reader.skip_space()
            if (yield from reader.skip(brackets[1])):
                break
            reader.add_arguments(", ")
        first = False
        inner: Any = True
        if brackets == "{}":
            yield from reader.skip_all(QUOTE)
            key = (yield from reader.collect_until(":", QUOTE, CLOSE)).strip()
            yield from reader.skip_all(QUOTE)
            yield from reader.expect(":")
            reader.add_arguments(as_json(key) + ": ")
            yield from reader.skip_space()
            inner = property_schema(schema, key, root)
        else:
            inner = item_schema(schema, root)
        yield from _value(reader, inner, root, depth + 1)
    reader.add_arguments(brackets[1])


def calls(lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
    functions = []
    for tool in tools:
        arguments = _ValueRules(lark, tool).value(tool.schema)
        functions.append(f"{lark.text(f'call:{tool.name}')} {arguments}")
    body = f"{lark.marker(OPEN)} ({' | '.join(functions)}) {lark.marker(CLOSE)}"
    call = lark.rule("call", body)
    return f"{call}+" if parallel else call


class _ValueRules:
    def __init__(self, lark: Lark, tool: Tool) -> None:
        self._lark = lark
        self._tool = tool
        self._named: dict[str, str] = {}  # rules by `$ref`
        self._any = ""

    def value(self, schema: Any) -> str:
        if schema is True or schema == {}:
            return self._anything()
        if not isinstance(schema, dict):
            raise not_enforceable("a schema that is no object", self._tool.name)
        if "$ref" in schema:
            return self._reference(schema["$ref"])
        for name in ("anyOf", "oneOf"):
            if name in schema:
                self._only(schema, name)
                return f"({' | '.join(map(self.value, schema[name]))})"
        if "enum" in schema or "const" in schema:
            self._only(schema, "enum", "const", "type")
            values = schema.get("enum", [schema.get("const")])
            return f"({' | '.join(map(self._constant, values))})"
        kinds = schema.get("type", KINDS)
        if isinstance(kinds, str):
            kinds = [kinds]
        return f"({' | '.join(self._kind(kind, schema) for kind in kinds)})"

    def _kind(self, kind: str, schema: Mapping[str, Any]) -> str:
        if kind == "string":
            self._only(schema, "type")
            return f"{self._lark.marker(QUOTE)} {self._lark.up_to(QUOTE)}"
        if kind == "array":
            self._only(schema, "type", "items")
            item = self._lark.rule("item", self.value(schema.get("items", True)))
            return f'"[" ({item} ("," {item})*)? "]"'
        if kind == "object":
            return self._object(schema)
        if kind not in PLAIN:
            raise not_enforceable(f"the type {kind!r}", self._tool.name)
        self._only(schema, "type")
        return PLAIN[kind]

    def _object(self, schema: Mapping[str, Any]) -> str:
        self._only(schema, "type", "properties", "required", "additionalProperties")
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        if not properties:
            closed = schema.get("additionalProperties", True) is False
            return '"{}"' if closed else self._anything_in_braces()
        # the remaining properties: with none written before, and with one
        first = ""
        rest = ""
        for key, inner in reversed(properties.items()):
            body = f"{self._lark.text(key + ':')} {self.value(inner)}"
            rule = self._lark.rule("property", body)
            needed = key in required
            first = self._lark.rule("first", _either(f"{rule} {rest}", first, needed))
            rest = self._lark.rule("rest", _either(f'"," {rule} {rest}', rest, needed))
        return f'"{{" {first} "}}"'

    def _reference(self, name: Any) -> str:
        if name not in self._named:
            _, _, place = str(name).partition("#/")
            group, _, key = place.partition("/")
            if group not in ("$defs", "definitions") or key not in self._tool.schema.get(group, {}):
                raise not_enforceable(f"the $ref {name!r}", self._tool.name)
            rule = self._lark.rule("named", "")
            self._named[name] = rule  # before its schema is read, which may refer to it
            self._lark.define(rule, self.value(self._tool.schema[group][key]))
        return self._named[name]

    def _constant(self, value: Any) -> str:
        lark = self._lark
        if isinstance(value, str):
            return f"{lark.marker(QUOTE)} {lark.text(value)} {lark.marker(QUOTE)}"
        if isinstance(value, dict | list):
            raise not_enforceable("an enum of objects or lists", self._tool.name)
        return lark.text(as_json(value))

    def _anything(self) -> str:
        if not self._any:
            self._any = self._lark.rule("any", "")
            self._lark.define(self._any, " | ".join(self._kind(kind, {}) for kind in KINDS))
        return self._any

    def _anything_in_braces(self) -> str:
        rule = self._lark.rule("property", f'{KEY_PATTERN} ":" {self._anything()}')
        return f'"{{" ({rule} ("," {rule})*)? "}}"'

    def _only(self, schema: Mapping[str, Any], *known: str) -> None:
        refuse_others(schema, set(known), self._tool.name)


def _either(body: str, skipped: str, needed: bool) -> str:
    if needed:
        return body
    return f"{body} | {skipped}" if skipped else f"({body})?"

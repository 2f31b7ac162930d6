"""Qwen3-Coder: `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`.

A value of type string is written literally, others as JSON.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from dflash_trt.chat.formats.definitions import NAME, Tool
from dflash_trt.chat.formats.lark import Lark, refuse_others
from dflash_trt.chat.formats.reader import BrokenError, Reader, Steps, as_json
from dflash_trt.files import parse_json

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
FUNCTION = "<function="
END = "</function>"
SIGN = f"{OPEN}\n{FUNCTION}"
PARAMETER = "<parameter="
END_VALUE = "</parameter>"
MARKERS = (OPEN, CLOSE)
WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}  # Python's too


def read(reader: Reader, tools: Sequence[Tool]) -> Steps[None]:
    schemas = {tool.name: tool.schema.get("properties") for tool in tools}
    while (yield from reader.until((OPEN, FUNCTION), reader.add_content)):
        if (yield from reader.attempt(_call(reader, schemas))):
            yield from reader.close(CLOSE)


def _call(reader: Reader, schemas: Mapping[str, Any]) -> Steps[None]:
    yield from reader.skip(OPEN)
    yield from reader.skip_space()
    yield from reader.expect(FUNCTION)
    name = yield from reader.collect_until(">")
    if not NAME.fullmatch(name):
        raise BrokenError
    yield from reader.expect(">")
    reader.begin_call(name)
    reader.add_arguments("{")
    properties = schemas.get(name)
    if not isinstance(properties, dict):
        properties = {}
    separator = ""
    while True:
        yield from reader.skip_space()
        if not (yield from reader.skip(PARAMETER)):
            break
        key = yield from reader.collect_until(">")
        yield from reader.expect(">")
        reader.add_arguments(f"{separator}{as_json(key)}: ")
        separator = ", "
        yield from reader.skip("\n")
        yield from _value(reader, properties.get(key))
    if reader.ended and any(word.startswith(reader.text) for word in (PARAMETER, END)):  # truncated
        reader.take(len(reader.text))
        return
    reader.add_arguments("}")
    yield from reader.expect(END)


def _value(reader: Reader, schema: Any) -> Steps[None]:
    kinds = _kinds(schema)
    if kinds == {"string"}:
        reader.add_arguments('"')
        yield from _literal(reader, lambda piece: reader.add_arguments(as_json(piece)[1:-1]))
        yield from reader.expect(END_VALUE)
        reader.add_arguments('"')
        return
    pieces: list[str] = []
    yield from _literal(reader, pieces.append)
    yield from reader.expect(END_VALUE)
    reader.add_arguments(_value_as_json("".join(pieces), kinds))


def _literal(reader: Reader, give: Callable[[str], object]) -> Steps[None]:
    """Pass on a value without the newline before its end."""
    newline = False

    def hold(piece: str) -> None:
        nonlocal newline
        piece = "\n" * newline + piece
        newline = piece.endswith("\n")
        give(piece[: len(piece) - newline])

    if (yield from reader.until((END_VALUE,), hold)) is None:
        raise BrokenError


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


def _kinds(schema: Any) -> set[str]:
    """Return the types that a schema names; "string" by default, as in vLLM."""
    if not isinstance(schema, dict):
        return {"string"}
    kinds: set[str] = set()
    has_reference = False
    branches: Any = schema.get("anyOf", schema.get("oneOf", [schema]))
    for branch in branches:
        if not isinstance(branch, dict):
            continue
        named = branch.get("type")
        names = named if isinstance(named, list) else [named]
        kinds.update(name for name in names if isinstance(name, str))
        has_reference |= "$ref" in branch
    if kinds:
        return kinds
    values = schema.get("enum")
    has_other = isinstance(values, list) and not all(isinstance(value, str) for value in values)
    return {"object"} if has_reference or has_other else {"string"}


def calls(lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
    functions = []
    for tool in tools:
        values = "".join(_parameter(lark, tool, key) for key in tool.schema.get("properties", {}))
        start = f"{FUNCTION}{tool.name}>\n"
        functions.append(f"{lark.text(start)}{values} {lark.text(END)}")
    body = f'{lark.marker(OPEN)} "\\n" ({" | ".join(functions)}) "\\n" {lark.marker(CLOSE)}'
    call = lark.rule("call", body)
    return f'{call} ("\\n" {call})*' if parallel else call


def _parameter(lark: Lark, tool: Tool, key: str) -> str:
    start = f"{PARAMETER}{key}>\n"
    rule = lark.rule("parameter", f'{lark.text(start)} {_value_grammar(lark, tool, key)} "\\n"')
    return f" {rule}" if key in tool.schema.get("required", []) else f" {rule}?"


def _value_grammar(lark: Lark, tool: Tool, key: str) -> str:
    schema = tool.schema["properties"][key]
    end = f"\n{END_VALUE}"
    if _kinds(schema) != {"string"}:
        shared = {
            name: tool.schema[name] for name in ("$defs", "definitions") if name in tool.schema
        }
        return f"{lark.json({**schema, **shared})} {lark.text(end)}"
    constants = [schema["const"]] if "const" in schema else []
    values = schema.get("enum", constants)
    if values:
        return f"({' | '.join(lark.text(value + end) for value in values)})"
    refuse_others(schema, {"type"}, f"{key} of {tool.name}")
    return lark.up_to(END_VALUE)

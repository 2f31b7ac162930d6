"""Tools as TypeScript, in which Kimi K2.5's tokenizer class shows them to its chat template.

The form is that of the repository's `tool_declaration_ts.py`. Where that gives up on a schema, the
template shows the tools as JSON.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

ARGUMENT = "tools_ts_str"  # of the template
INDENT = "  "
NEXT = ",\n"
SCALARS = {"integer": "number"}
UNION = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "null": "null",
    "object": "{}",
    "array": "Array<any>",
}
# what a comment tells of a type beside its description
LIMITS = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
ENUM_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "number": (int, float),
    "integer": int,
    "boolean": bool,
}
DEFINITIONS = "#/$defs/"
ROOT = "parameters"  # the name of a schema that refers to itself


def sorted_deeply(value: Any) -> Any:
    """Sort the keys of all objects, as the tokenizer class does with tools."""
    if isinstance(value, Mapping):
        return {key: sorted_deeply(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [sorted_deeply(item) for item in value]
    return value


def declarations(tools: Sequence[Any]) -> str | None:
    """Return the declarations of tools with sorted keys; None for a schema without such a form."""
    functions = [tool["function"] for tool in tools if tool.get("function")]
    # whatever fails there fails as a whole
    with suppress(AttributeError, KeyError, RecursionError, TypeError, ValueError):
        texts = [_function(function) for function in functions]
        body = "\n".join(texts)
        return f"# Tools\n\n## functions\nnamespace functions {{\n{body}\n}}\n" if texts else None
    return None


class _Known:
    """Definitions met so far, and whether the whole schema is referred to."""

    def __init__(self) -> None:
        self.definitions: dict[str, Any] = {}
        self.refers_to_root = False

    def has(self, reference: str) -> bool:
        return isinstance(self.definitions.get(_last(reference)), Mapping)


def _function(function: Mapping[str, Any]) -> str:
    known = _Known()
    parameters = function.get("parameters") or {}
    _check_object(parameters, known)
    lines = []
    argument = _object(parameters, "")
    if known.refers_to_root:
        fields = [_field(name, parameters, INDENT) for name in parameters.get("properties", {})]
        lines.append(f"interface {ROOT} {{{_lines(fields)}}}")
        argument = ROOT
    for name, schema in dict(known.definitions).items():
        _check(schema, known)
        comment = schema.get("description", "")
        if comment:
            lines.append(_comment(comment, ""))
        lines.append(f"interface {name} {_type(schema, '')}")
    if function.get("description"):
        lines.append(_comment(function["description"], ""))
    lines.append(f"type {function.get('name', 'function')} = (_: {argument}) => any;")
    return "\n".join(lines)


# --- what a schema may be -------------------------------------------------------------------------


def _kind(schema: Any) -> str:
    """Return what a schema is read as; ValueError if nothing."""
    if isinstance(schema, bool):
        return "bool"
    for name, kind in (("$ref", "ref"), ("anyOf", "any of"), ("enum", "enum")):
        if name in schema:
            return kind
    if "type" in schema:
        stated = schema["type"]
        if isinstance(stated, list):
            return "union"
        return stated if stated in ("object", "array") else "scalar"
    if schema != {}:
        raise ValueError(schema)
    return "any"


def _last(reference: str) -> str:
    return reference.rpartition("/")[2]


def _check(schema: Any, known: _Known) -> None:
    kind = _kind(schema)
    if kind == "ref":
        _check_reference(schema["$ref"], known)
    elif kind == "any of":
        for choice in schema["anyOf"]:
            _check(choice, known)
    elif kind == "enum":
        _check_enum(schema)
    elif kind == "object":
        _check_object(schema, known)
    elif kind == "array" and schema.get("items"):
        _check(schema["items"], known)


def _check_reference(reference: str, known: _Known) -> None:
    if reference == "#":
        known.refers_to_root = True
    elif not reference.startswith(DEFINITIONS) or not known.has(reference):
        raise ValueError(reference)


def _check_enum(schema: Mapping[str, Any]) -> None:
    stated = schema.get("type")
    if isinstance(stated, list):
        others = [name for name in stated if name != "null"]
        if len(stated) > 2 or len(others) != 1:
            raise ValueError(stated)
        stated = others[0]
    wanted = ENUM_TYPES.get(stated) if isinstance(stated, str) else None
    if wanted and not all(value is None or isinstance(value, wanted) for value in schema["enum"]):
        raise ValueError(schema["enum"])


def _check_object(schema: Mapping[str, Any], known: _Known) -> None:
    known.definitions |= schema.get("$defs") or {}
    others = schema.get("additionalProperties")
    if isinstance(others, Mapping):
        _check(others, known)
    for property in schema.get("properties", {}).values():
        _check(property, known)


# --- what is written ------------------------------------------------------------------------------


def _type(schema: Any, indent: str) -> str:
    kind = _kind(schema)
    if kind == "bool":
        return "any" if schema else "null"
    if kind == "ref":
        reference: str = schema["$ref"]
        return ROOT if reference == "#" else _last(reference)
    if kind == "any of":
        return " | ".join(_type(choice, indent) for choice in schema["anyOf"])
    if kind == "enum":
        return " | ".join(f'"{it}"' if isinstance(it, str) else str(it) for it in schema["enum"])
    if kind == "union":
        return " | ".join(UNION[name] for name in schema["type"])
    if kind == "object":
        return _object(schema, indent)
    if kind == "array":
        return _array(schema, indent)
    return "any" if kind == "any" else str(SCALARS.get(schema["type"], schema["type"]))


def _object(schema: Mapping[str, Any], indent: str) -> str:
    inner = indent + INDENT
    properties = schema.get("properties", {})
    required = set(schema.get("required", []))
    names = sorted(properties, key=lambda name: (name not in required, name))
    fields = [_field(name, schema, inner) for name in names]
    others = schema.get("additionalProperties")
    if others is not None:
        kind = "any" if others is True else "never"
        if isinstance(others, Mapping):
            kind = _type(others, inner)
        elif not isinstance(others, bool):
            raise ValueError(others)
        fields.append(f"{inner}[k: string]: {kind}")
    return f"{{{_lines(fields)}{indent}}}" if fields else "{}"


def _lines(fields: Sequence[str]) -> str:
    return f"\n{NEXT.join(fields)}\n" if fields else ""


def _field(name: str, schema: Mapping[str, Any], indent: str) -> str:
    value = schema["properties"][name]
    comments = _comments(value, indent)
    default = value.get("default") if isinstance(value, Mapping) else None
    if default is not None:
        is_number = isinstance(default, int | float)
        text = repr(default) if is_number else json.dumps(default, ensure_ascii=False)
        comments += f"{indent}// Default: {text}\n"
    optional = "" if name in schema.get("required", []) else "?"
    return f"{comments}{indent}{name}{optional}: {_type(value, indent)}"


def _array(schema: Mapping[str, Any], indent: str) -> str:
    inner = indent + INDENT
    items = schema.get("items")
    if not items:
        return "Array<any>"
    comments = _comments(items, inner)
    if not comments:
        return f"Array<{_type(items, indent)}>"
    return f"Array<\n{comments}{inner}{_type(items, inner)}\n{indent}>"


def _comments(schema: Any, indent: str) -> str:
    if isinstance(schema, bool):
        return ""
    lines = []
    if schema.get("description"):
        lines.append(_comment(schema["description"], indent))
    limits = []
    if _kind(schema) in ("scalar", "array"):
        names = LIMITS.get(schema["type"], ())
        limits = [f"{name}: {schema[name]}" for name in names if name in schema]
    if limits:
        lines.append(f"{indent}// {', '.join(limits)}")
    return "".join(f"{line}\n" for line in lines)


def _comment(text: str, indent: str) -> str:
    return "\n".join(f"{indent}// {line}" if line else "" for line in text.split("\n"))

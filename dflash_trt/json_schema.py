"""Conversion of clients' JSON Schemas and regular expressions for llguidance."""

import re
from typing import Any

from dflash_trt.errors import RequestError

# formats that llguidance enforces; others are annotations (JSON Schema 2020-12, validation, 7.2)
FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri"}
FORMATS |= {"uuid"}
ANNOTATIONS = {"title", "description", "default", "examples", "format", "$comment"}
ANNOTATIONS |= {"deprecated", "readOnly", "writeOnly"}
# values with which keywords assert nothing
NEUTRAL: dict[str, list[Any]] = {"uniqueItems": [False], "not": [False]}
NEUTRAL |= {key: [True, {}] for key in ("unevaluatedProperties", "unevaluatedItems")}
NEUTRAL |= {key: [{}] for key in ("dependentRequired", "dependentSchemas", "dependencies")}
NEUTRAL["propertyNames"] = [True, {}, {"type": "string"}]
# keywords that assert nothing without one of these beside them
PARTNERS = {"if": {"then", "else"}, "then": {"if"}, "else": {"if"}}
PARTNERS |= {"minContains": {"contains"}, "maxContains": {"contains"}}
PARTNERS |= {"$dynamicAnchor": set(), "$recursiveAnchor": set()}
BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
DATA = ("const", "default", "enum", "example", "examples")
ASCII = {"d": "0-9", "w": "_0-9A-Za-z", "s": r" \t-\r"}  # a range last: "-" may follow
REGEX_PARTS = re.compile(r"\\.|\[\^?\]?|.", re.DOTALL)


def without_annotations(schema: Any) -> Any:
    """Return a schema without non-asserting keywords, which llguidance would refuse.

    Patterns are converted by `ascii_classes`. Raises RequestError for deep nesting.
    """
    try:
        return _without_annotations(schema)
    except RecursionError:
        raise RequestError("a JSON schema is nested too deeply", "Send a flatter one.") from None


def _without_annotations(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_annotations(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result: dict[str, Any] = {}
    for name, value in schema.items():
        if _asserts_nothing(name, value, schema):
            continue
        if name in DATA:
            result[name] = value
        elif name == "pattern" and isinstance(value, str):
            result[name] = ascii_classes(value)
        elif name in BY_NAME and isinstance(value, dict):
            spell = ascii_classes if name == "patternProperties" else str
            result[name] = {spell(key): _without_annotations(item) for key, item in value.items()}
        else:
            result[name] = _without_annotations(value)
    return result


def _asserts_nothing(name: str, value: Any, schema: dict[str, Any]) -> bool:
    if name == "format":
        return isinstance(value, str) and value not in FORMATS
    if name in PARTNERS:
        return not PARTNERS[name] & schema.keys()
    if name in NEUTRAL and isinstance(value, dict) and name != "dependentSchemas":
        value = {key: item for key, item in value.items() if key not in ANNOTATIONS}
    # 0 is not false
    return any(type(item) is type(value) and item == value for item in NEUTRAL.get(name, ()))


def ascii_classes(pattern: str) -> str:
    r"""Return a regular expression whose `\d`, `\w`, `\s` are ASCII's, `\D` and `\W` all else.

    Rust's have those of all scripts; clients know ECMAScript's and those of other servers. `\S` is
    as it was: what it matches is no white space by anybody's reading.
    """
    depth, result = 0, ""
    for part in REGEX_PARTS.findall(pattern):
        letter = part[1:] if part[0] == "\\" else ""
        if (characters := ASCII.get(letter.lower())) and letter != "S":
            inverse = "^" if letter.isupper() else ""
            part = characters if depth and not inverse else f"[{inverse}{characters}]"
        elif part[0] == "[":
            depth += 1
        elif part == "]":
            depth = max(0, depth - 1)
        result += part
    return result

"""Types of arguments by a tool's JSON Schema, through references and combinations."""

import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

Schema = Mapping[str, Any]
MOST_BRANCHES = 64
# keywords that say a type without naming it
IMPLIED = {
    "object": {"properties", "patternProperties", "additionalProperties", "propertyNames"},
    "array": {"items", "prefixItems", "contains", "uniqueItems", "minItems", "maxItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
}
COMBINING = {"$ref", "allOf", "anyOf", "oneOf"}


def branches(schema: Any, root: Schema) -> list[dict[str, Any]]:
    """Return schemas without references and combinations, one of which a value must fit.

    A reference within itself says nothing (core 8.2.3, 10.2.1 of JSON Schema 2020-12).
    """
    return _branches(schema, root, frozenset())


def _branches(schema: Any, root: Schema, seen: frozenset[str]) -> list[dict[str, Any]]:
    if not isinstance(schema, Mapping):
        return [{}]
    result = [{name: value for name, value in schema.items() if name not in COMBINING}]
    parts = _as_list(schema.get("allOf"))
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in seen:
        seen |= {reference}
        parts = [_target(reference, root), *parts]
    for part in parts:
        result = _combined(result, _branches(part, root, seen))
    for name in ("anyOf", "oneOf"):
        choices = [branch for part in _as_list(schema.get(name))
                   for branch in _branches(part, root, seen)]  # fmt: skip
        if choices:
            result = _combined(result, choices)
    return result


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _target(reference: str, root: Schema) -> Any:
    """Return what a JSON pointer names; True, which says nothing, if it names nothing."""
    place: Any = root
    _, _, pointer = reference.partition("#")
    for key in pointer.split("/")[1:]:
        key = unquote(key).replace("~1", "/").replace("~0", "~")
        if isinstance(place, list) and key.isdecimal() and int(key) < len(place):
            place = place[int(key)]
        elif isinstance(place, Mapping) and key in place:
            place = place[key]
        else:
            return True
    return place


def _combined(
    left: Sequence[dict[str, Any]], right: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    result = [_merged(one, other) for one in left for other in right]
    return result[:MOST_BRANCHES]


def _merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    result = {**one, **other}
    if "type" in one and "type" in other:
        names = _names(one["type"]) & _names(other["type"])
        result["type"] = sorted(names or _names(other["type"]))
    if isinstance(one.get("properties"), Mapping) and isinstance(other.get("properties"), Mapping):
        result["properties"] = {**one["properties"], **other["properties"]}
    required = [*_as_list(one.get("required")), *_as_list(other.get("required"))]
    if required:
        result["required"] = required
    return result


def _names(kind: Any) -> set[str]:
    names = kind if isinstance(kind, list) else [kind]
    return {name for name in names if isinstance(name, str)}


def types_of(schema: Any, root: Schema) -> set[str]:
    """Return the types that a value may have; none if the schema does not say."""
    result: set[str] = set()
    for branch in branches(schema, root):
        types = _types_of_branch(branch)
        if not types:
            return set()
        result |= types
    return result


def _types_of_branch(branch: Schema) -> set[str]:
    types = _names(branch.get("type"))
    if types:
        return types
    if "const" in branch:
        return {_type_of(branch["const"])}
    if _as_list(branch.get("enum")):
        return {_type_of(value) for value in branch["enum"]}
    return {name for name, keywords in IMPLIED.items() if keywords & branch.keys()}


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    for kind, name in ((bool, "boolean"), (str, "string"), (list, "array"), (dict, "object")):
        if isinstance(value, kind):
            return name
    return "integer" if isinstance(value, int) else "number"


def property_schema(schema: Any, key: str, root: Schema) -> Any:
    """Return the schema of an object's value; True, which says nothing, if it has none."""
    known = [_property(branch, key) for branch in branches(schema, root)]
    known = [value for value in known if value is not True]
    if len(known) == 1:
        return known[0]
    return {"anyOf": known} if known else True


def _property(branch: Schema, key: str) -> Any:
    properties = branch.get("properties")
    if isinstance(properties, Mapping) and key in properties:
        return properties[key]
    patterns = branch.get("patternProperties")
    for pattern, value in patterns.items() if isinstance(patterns, Mapping) else ():
        if _matches(pattern, key):
            return value
    others = branch.get("additionalProperties")
    return others if isinstance(others, Mapping) else True


def _matches(pattern: Any, key: str) -> bool:
    try:
        return bool(re.search(pattern, key[:256]))
    except (re.error, TypeError):
        return False


def item_schema(schema: Any, root: Schema) -> Any:
    """Return the schema of a list's items; True, which says nothing, if it has none."""
    known = [branch["items"] for branch in branches(schema, root) if "items" in branch]
    if len(known) == 1:
        return known[0]
    return {"anyOf": known} if known else True


def properties_of(schema: Schema) -> dict[str, Any]:
    """Return the properties that an object's schema names, wherever it names them."""
    result: dict[str, Any] = {}
    for branch in branches(schema, schema):
        named = branch.get("properties")
        for key in named if isinstance(named, Mapping) else ():
            result[key] = property_schema(schema, key, schema)
    return result


def required_of(schema: Schema) -> set[str]:
    """Return the properties that an object must have."""
    required = [set(_as_list(branch.get("required"))) for branch in branches(schema, schema)]
    return set.intersection(*required)

"""Errors in a build config, with file, line, field and fix."""

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from dflash_trt.errors import ConfigError

MOST = 20  # complaints shown
SCHEMA = "`dflash-trt schema` shows what each field takes"
Complaint = tuple[int, str, str]  # line, problem, fix


def wrong_fields(
    path: Path, root: yaml.Node, model: type[BaseModel], data: dict[str, Any]
) -> list[Complaint]:
    """Return all of pydantic's complaints, with lines."""
    try:
        model.model_validate(data)
    except ValidationError as error:
        return [_explain(path, root, model, each) for each in error.errors(include_url=False)]
    return []


def repeated(path: Path, node: yaml.Node) -> Iterator[Complaint]:
    """Yield keys that YAML would silently override."""
    if not isinstance(node, yaml.MappingNode):
        return
    seen: set[str] = set()
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode):
            if key.value in seen:
                line = key.start_mark.line + 1
                yield line, f"{path}:{line}: '{key.value}' is given twice", "Keep one of the two"
            seen.add(key.value)
        yield from repeated(path, value)


def together(path: Path, found: Sequence[Complaint]) -> ConfigError:
    """Combine all complaints in one error."""
    if len(found) == 1:
        return ConfigError(*found[0][1:])
    lines = [f"{problem}. {fix}." for _, problem, fix in found[:MOST]]
    more = [f"and {len(found) - MOST} more."] * (len(found) > MOST)
    return ConfigError(
        "\n".join([f"{path} has {len(found)} mistakes:", *lines, *more]), "Correct all of them"
    )


def _explain(path: Path, root: yaml.Node, model: type[BaseModel], error: ErrorDetails) -> Complaint:
    kind, message, loc = error["type"], error["msg"], [*error["loc"]]
    if kind == "no_drafter":
        kind, loc = "missing", ["drafter"]
    loc += ["kind"] * (kind == "union_tag_invalid")
    line, field = _place(root, loc)
    problem, fix = (
        f"{field} is {error['input']!r:.100}, but {message[0].lower()}{message[1:]}",
        SCHEMA,
    )
    if kind == "extra_forbidden":
        schema = model.model_json_schema()
        sections = [each.get("properties", {}) for each in (schema, *schema["$defs"].values())]
        known = {name for section in sections if loc[-1] not in section for name in section}
        near = difflib.get_close_matches(str(loc[-1]), known, n=1)
        problem, fix = f"unknown field '{field}'", f"Did you mean '{near[0]}'?" if near else SCHEMA
    elif kind == "missing":
        value = "{path: DIRECTORY}" if field in ("target", "drafter") else "VALUE"
        problem, fix = f"field '{field}' is missing", f"Add {field}: {value} to the config"
    elif kind == "source":
        problem = f"{field}: {message}"
        fix = f"Write {field}: {{path: DIRECTORY}} or {field}: {{hub: ORG/NAME, revision: COMMIT}}"
    return line, f"{path}:{line}: {problem}", fix


def _place(node: yaml.Node, loc: Sequence[int | str]) -> tuple[int, str]:
    """Return the 1-based line of the key at `loc`, or of its deepest existing part, and its name.

    The name omits what pydantic inserts for a union: a kind, or a class name.
    """
    line, names = node.start_mark.line + 1, list[str]()
    for i, part in enumerate(loc):
        keys = node.value if isinstance(node, yaml.MappingNode) else []
        found = next(((key, value) for key, value in keys if key.value == part), None)
        if found is not None:
            line, node = found[0].start_mark.line + 1, found[1]
        if found is not None or i == len(loc) - 1:
            names.append(str(part))
    return line, ".".join(names)

"""What is wrong with a build config, told by file, line, field and fix."""

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import yaml
from pydantic import BaseModel, ValidationError

from dflash_trt.errors import ConfigError


def explain(
    path: Path, root: yaml.Node, model: type[BaseModel], error: ValidationError
) -> ConfigError:
    """The first complaint in the file's own order, with its line."""
    complaints = error.errors(include_url=False, include_input=True)
    first = min(complaints, key=lambda e: _line(root, _path(e["loc"])))
    loc, given = _path(first["loc"]), first["input"]
    if first["type"] == "union_tag_invalid":
        loc, given = (*loc, "kind"), first["ctx"]["tag"]
    field = ".".join(str(part) for part in loc)
    where = f"{path}:{_line(root, loc)}"
    if loc[:2] == ("engine", "hardware"):
        what = "is missing" if first["type"] == "missing" else f"is wrong: {first['msg']}"
        return ConfigError(
            f"{where}: {field} {what}", "`dflash-trt schema` shows what a machine is described by"
        )
    if first["type"] == "extra_forbidden":
        known = _fields(model, first["loc"][:-1])
        near = difflib.get_close_matches(str(first["loc"][-1]), known, n=1)
        guess = f"Did you mean '{near[0]}'? " if near else ""
        return ConfigError(
            f"{where}: unknown field '{field}'", f"{guess}Known here: {', '.join(known)}"
        )
    if first["type"] == "missing":
        source = field in ("target", "drafter")
        return ConfigError(
            f"{where}: field '{field}' is missing",
            f"Add {field}: {'{path: DIRECTORY}' if source else 'VALUE'} to the config",
        )
    if first["type"] == "source":
        return ConfigError(
            f"{where}: {field}: {first['msg']}",
            f"Write {field}: {{path: DIRECTORY}} or {field}: {{hub: ORG/NAME, revision: COMMIT}}",
        )
    if first["type"] in ("model_type", "model_attributes_type"):
        message = f"it takes fields: {', '.join(_fields(model, first['loc']))}"
    else:
        message = first["msg"][0].lower() + first["msg"][1:]
    return ConfigError(
        f"{where}: {field} is {given!r}, but {message}",
        f"Correct {field}; `dflash-trt schema` shows what each field takes",
    )


def _path(loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Without the engine's kind, which pydantic puts behind `engine`, nor `hardware`'s."""
    path = (loc[0], *loc[2:]) if loc[0] == "engine" and len(loc) > 1 else loc
    return (*path[:2], *path[3:]) if path[1:2] == ("hardware",) else path


def _line(node: yaml.Node, loc: tuple[int | str, ...]) -> int:
    """1-based line of the key at `loc`, or of the deepest part of it that is in the file."""
    line = node.start_mark.line + 1
    for part in loc:
        if not isinstance(node, yaml.MappingNode):
            break
        for key, value in node.value:
            if key.value == part:
                line, node = key.start_mark.line + 1, value
                break
        else:
            break
    return line


def _fields(model: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    """The fields of the section at `loc`, as pydantic gives it: with an engine's kind."""
    parts = iter(loc)
    for part in parts:
        annotation = model.model_fields[str(part)].annotation
        if kinds := get_args(annotation):
            kind = next(parts, "onnxruntime")
            (annotation,) = (x for x in kinds if str(kind) in get_args(_kind_of(x)))
        assert isinstance(annotation, type)  # every section is a plain class
        model = annotation
    return list(model.model_fields)


def _kind_of(engine: type[BaseModel]) -> object:
    return engine.model_fields["kind"].annotation


def repeated_keys(node: yaml.Node) -> Iterator[tuple[int, str]]:
    """(line, key) of keys that YAML would silently override."""
    if not isinstance(node, yaml.MappingNode):
        return
    seen: set[str] = set()
    for key, value in node.value:
        if key.value in seen:
            yield key.start_mark.line + 1, key.value
        seen.add(str(key.value))
        yield from repeated_keys(value)

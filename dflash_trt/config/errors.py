"""What is wrong with a build config, told by file, line, field and fix."""

import copy
import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from dflash_trt.errors import ConfigError

MOST = 20  # complaints that are told
Complaint = tuple[int, str, str]  # line, problem, fix


def wrong_fields(
    path: Path, root: yaml.Node, model: type[BaseModel], data: dict[str, Any]
) -> list[Complaint]:
    """Every complaint of pydantic's, with its line.

    It compares no fields of a section in which one is wrong: such fields are left out then, and
    what remains is looked at again.
    """
    found: dict[tuple[int | str, ...], ErrorDetails] = {}
    rest = copy.deepcopy(data)
    while True:
        try:
            model.model_validate(rest)
            new = {}
        except ValidationError as error:
            new = {
                (each["type"], *each["loc"]): each
                for each in error.errors(include_url=False)
                if not (found and each["type"] == "missing")  # it was left out here
            }
        new = {key: each for key, each in new.items() if key not in found}
        found |= new
        if not [each for each in new.values() if _leave_out(rest, _path(each["loc"]))]:
            return [_explain(path, root, model, each) for each in found.values()]


def _leave_out(data: dict[str, Any], path: tuple[int | str, ...]) -> bool:
    """Whether the field at `path` lies in an optional section and was there."""
    if path[0] in ("target", "drafter"):
        return False
    node, inner = data, []
    for part in path:
        if not isinstance(node, dict) or part not in node:
            break
        inner.append((node, part))
        node = node[part]
    if len(inner) < 2:
        return False
    section, name = inner[-1]
    del section[name]
    return True


def repeated(path: Path, node: yaml.Node) -> Iterator[Complaint]:
    """Keys that YAML would silently override."""
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
    """One error of all that is wrong."""
    if len(found) == 1:
        return ConfigError(*found[0][1:])
    lines = [f"{problem}. {fix}." for _, problem, fix in found[:MOST]]
    more = [f"and {len(found) - MOST} more."] * (len(found) > MOST)
    return ConfigError(
        "\n".join([f"{path} has {len(found)} mistakes:", *lines, *more]), "Correct all of them"
    )


def _explain(path: Path, root: yaml.Node, model: type[BaseModel], error: ErrorDetails) -> Complaint:
    """Line, problem and fix."""
    kind, message, loc, given = error["type"], error["msg"], _path(error["loc"]), error["input"]
    if kind == "union_tag_invalid":
        loc, given = (*loc, "kind"), error["ctx"]["tag"]
    if kind == "no_drafter":
        kind, loc = "missing", ("drafter",)
    field, line = ".".join(str(part) for part in loc), _line(root, loc)
    if loc[:2] == ("engine", "hardware"):
        problem = f"{field} {'is missing' if kind == 'missing' else f'is wrong: {message}'}"
        fix = "`dflash-trt schema` shows what a machine is described by"
    elif kind == "extra_forbidden":
        known = _fields(model, error["loc"][:-1])
        near = difflib.get_close_matches(str(error["loc"][-1]), known, n=1)
        guess = f"Did you mean '{near[0]}'? " if near else ""
        problem, fix = f"unknown field '{field}'", f"{guess}Known here: {', '.join(known)}"
    elif kind == "missing":
        value = "{path: DIRECTORY}" if field in ("target", "drafter") else "VALUE"
        problem, fix = f"field '{field}' is missing", f"Add {field}: {value} to the config"
    elif kind == "source":
        problem = f"{field}: {message}"
        fix = f"Write {field}: {{path: DIRECTORY}} or {field}: {{hub: ORG/NAME, revision: COMMIT}}"
        fix += f" or {field}: {{gguf: FILE}}" * (field == "target")
    else:
        said = message[0].lower() + message[1:]
        if kind in ("model_type", "model_attributes_type"):
            said = f"it takes fields: {', '.join(_fields(model, error['loc']))}"
        problem = f"{field} is {given!r:.100}, but {said}"
        fix = f"Correct {field}; `dflash-trt schema` shows what each field takes"
    return line, f"{path}:{line}: {problem}", fix


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
        args = [each for each in get_args(annotation) if each is not NoneType]
        if get_origin(annotation) is dict:  # by method
            next(parts, None)
            annotation = args[-1]
        elif len(args) == 1:  # it may be left out
            (annotation,) = args
        elif args:
            kind = next(parts, "onnxruntime")
            (annotation,) = (
                x for x in args if str(kind) in get_args(x.model_fields["kind"].annotation)
            )
        assert isinstance(annotation, type)  # every section is a plain class
        model = annotation
    return list(model.model_fields)

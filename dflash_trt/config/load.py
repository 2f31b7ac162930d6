"""Loading a build config, errors with file, line, field and fix, and configs of other methods."""

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from dflash_trt.config.build import DRAFTERLESS, BuildConfig, Method, Speculation
from dflash_trt.errors import ConfigError
from dflash_trt.files import MAX_YAML, compose_yaml, parse_yaml, read_text

MOST = 20  # complaints shown
BASE = "extends"
LOCAL_PATHS = ("path", "gguf", "calibration", "package_lock")  # fields of type `LocalPath`
Complaint = tuple[int, str, str]  # line, problem, fix
SCHEMA = "`dflash-trt schema` shows what each field takes"
# fields that are gone, with what to do
GONE = {"tensor_parallel_size": "For several GPUs use engine: {kind: tensorrt_llm, gpus: N}"}


@dataclass(frozen=True)
class Document:
    """A config as it was written."""

    path: Path
    text: str
    root: yaml.MappingNode
    data: dict[str, Any]


def load_config(path: Path) -> BuildConfig:
    """Read a config, whose paths start at its folder; ConfigError names file, line, field, fix."""
    document = _read(path)
    complaints = list(repeated_keys(path, document.root))
    data = _with_base(document)
    try:
        config = BuildConfig.model_validate(data, context={"folder": path.resolve().parent})
    except ValidationError as error:
        errors = error.errors(include_url=False)
        complaints += [_complaint(path, document.root, detail) for detail in errors]
    if len(complaints) == 1:
        raise ConfigError(*complaints[0][1:])
    if complaints:
        shown = [str(ConfigError(*complaint[1:])) for complaint in sorted(complaints)[:MOST]]
        if len(complaints) > MOST:
            shown.append(f"and {len(complaints) - MOST} more.")
        problem = "\n".join([f"{path} has {len(complaints)} mistakes:", *shown])
        raise ConfigError(problem, "Correct all of them")
    return variants(config)[config.speculation.method]


def config_text(path: Path) -> str:
    """Return a config's text; of one that extends another, both as one."""
    document = _read(path)
    if BASE not in document.data:
        return document.text
    whole = yaml.safe_dump(_with_base(document), sort_keys=False)
    return f"# {path.name}, which extends {document.data[BASE]}\n{whole}"


def _read(path: Path) -> Document:
    try:
        text = read_text(path, MAX_YAML)
        root = compose_yaml(text)
        data = parse_yaml(root)
    except OSError as error:
        raise ConfigError(
            f"cannot read the config {path}: {error.strerror}",
            "Give the path of a YAML file such as build_configs/pycode.yaml",
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text", "Save the config as UTF-8") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        what = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{where}: not valid YAML: {what}", "Correct that line") from error
    except ValueError as error:
        raise ConfigError(f"{path}: {error}", "Correct it") from error
    if not isinstance(root, yaml.MappingNode) or not isinstance(data, dict):
        raise ConfigError(
            f"{path} does not hold a mapping of fields",
            "Start from build_configs/pycode.yaml: it needs name, target and drafter",
        )
    return Document(path, text, root, data)


def _with_base(document: Document) -> dict[str, Any]:
    """Return the fields, over those of the config that it extends."""
    data = dict(document.data)
    name = data.pop(BASE, None)
    if name is None:
        return data
    if not isinstance(name, str):
        raise ConfigError(
            f"{document.path}: {BASE} is {name!r:.100}, and no path of a config",
            f"Write {BASE}: FILE, a path that starts at the folder of {document.path.name}",
        )
    base = _read(document.path.parent / name)
    if BASE in base.data:
        raise ConfigError(
            f"{base.path} extends another config itself", "Extend a config that is whole"
        )
    load_config(base.path)
    return _merged(_with_absolute_paths(base.data, base.path.resolve().parent), data)


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for name, value in over.items():
        before = result.get(name)
        if isinstance(value, dict) and isinstance(before, dict):
            result[name] = _merged(before, value)
        else:
            result[name] = value
    return result


def _with_absolute_paths(data: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return a base's fields for a config in another folder."""
    if "package" in data:  # its path is inside the package
        return dict(data)
    result: dict[str, Any] = {}
    for name, value in data.items():
        if isinstance(value, dict):
            result[name] = _with_absolute_paths(value, folder)
        elif name in LOCAL_PATHS and isinstance(value, str):
            result[name] = str(Path(folder, os.path.expanduser(value)))
        else:
            result[name] = value
    return result


def variants(config: BuildConfig) -> dict[Method, BuildConfig]:
    """Return the config for each method it supports, in the order of `Method`.

    Options of its own method (`draft_tokens`, `policy`, ..) apply to its own variant only.
    """
    configured = config.speculation
    # the method of `drafter`; the usual one if the config's method has none
    whose: Method = (
        "dflash" if configured.method in (*DRAFTERLESS, *config.drafters) else configured.method
    )
    drafters = dict(config.drafters)
    if config.drafter is not None and config.drafter not in drafters.values():
        drafters = {whose: config.drafter} | drafters
    matching: dict[Method, BuildConfig] = {}
    for method in get_args(Method):
        if method not in (*drafters, *DRAFTERLESS) or method not in config.engine.methods:
            continue
        speculation = configured if method == configured.method else Speculation(method=method)
        changed = {"drafter": drafters.get(method), "drafters": drafters}
        values = config.model_copy(update={"speculation": speculation, **changed})
        matching[method] = BuildConfig.model_validate(dict(values))
    return matching


def json_schema() -> dict[str, Any]:
    dialect = "https://json-schema.org/draft/2020-12/schema"
    schema = BuildConfig.model_json_schema()
    schema["properties"][BASE] = {
        "type": "string",
        "description": "names another config, whose fields hold where this one has none",
    }
    whole = {"required": schema.pop("required")}
    return {"$schema": dialect, **schema, "anyOf": [whole, {"required": [BASE]}]}


def repeated_keys(path: Path, node: yaml.Node) -> Iterator[Complaint]:
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
        yield from repeated_keys(path, value)


def _complaint(path: Path, root: yaml.Node, error: ErrorDetails) -> Complaint:
    kind, message, loc = error["type"], error["msg"], [*error["loc"]]
    if kind == "no_drafter":
        kind, loc = "missing", ["drafter"]
    loc += ["kind"] * (kind == "union_tag_invalid")
    line, field = _line_and_name(root, loc)
    problem = f"{field} is {error['input']!r:.100}, but {message[0].lower()}{message[1:]}"
    fix = SCHEMA
    if kind == "extra_forbidden":
        schema = BuildConfig.model_json_schema()
        sections = [
            definition.get("properties", {}) for definition in (schema, *schema["$defs"].values())
        ]
        known = {name for section in sections if loc[-1] not in section for name in section}
        near = difflib.get_close_matches(str(loc[-1]), known, n=1)
        guess = f"Did you mean '{near[0]}'?" if near else SCHEMA
        problem, fix = f"unknown field '{field}'", GONE.get(str(loc[-1]), guess)
    elif kind == "missing":
        value = "{path: DIRECTORY}" if field in ("target", "drafter") else "VALUE"
        problem, fix = f"field '{field}' is missing", f"Add {field}: {value} to the config"
    elif kind == "source":
        problem = f"{field}: {message}"
        fix = f"Write {field}: {{path: DIRECTORY}} or {field}: {{hub: ORG/NAME, revision: COMMIT}}"
    return line, f"{path}:{line}: {problem}", fix


def _line_and_name(node: yaml.Node, loc: Sequence[int | str]) -> tuple[int, str]:
    """Return line (from 1) and name of the key at `loc`, or of its deepest existing part."""
    line, names = node.start_mark.line + 1, list[str]()
    for i, part in enumerate(loc):
        keys = node.value if isinstance(node, yaml.MappingNode) else []
        matching = next(((key, value) for key, value in keys if key.value == part), None)
        if matching is not None:
            line, node = matching[0].start_mark.line + 1, matching[1]
        # without what pydantic inserts for a union: a kind, or a class name
        if matching is not None or i == len(loc) - 1:
            names.append(str(part))
    return line, ".".join(names)

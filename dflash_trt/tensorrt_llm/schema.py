"""Arguments of TensorRT-LLM's `LLM(...)`: llm_args.schema.json, the JSON Schema of its class."""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from typing import Any, ClassVar, NamedTuple, get_args

import yaml

from dflash_trt.config import Version

# of `speculative_config`, by method
DECODING_TYPES: dict[str, str] = {"dflash": "DFlash", "eagle3": "Eagle3", "ngram": "NGram"}
Schema = Mapping[str, Any]


@cache
def schema() -> dict[str, Any]:
    file = files(__package__).joinpath("llm_args.schema.json")
    return dict(json.loads(file.read_text("utf-8")))


class Refusal(NamedTuple):
    name: str  # dotted
    value: Any
    why: str
    fix: str


def refusal(args: Mapping[str, Any], method: str) -> Refusal | None:
    """Return the first error of arguments for a method; None if they are valid."""
    # imported here: it takes a while to load
    from jsonschema import Draft202012Validator  # noqa: PLC0415
    from jsonschema.exceptions import best_match  # noqa: PLC0415

    plain = json.loads(json.dumps(args, default=str))  # keys of a mapping become text
    properties = dict(schema()["properties"])
    marks = {"speculative_config": {"decoding_type": DECODING_TYPES.get(method)}}
    for name in plain.keys() & properties.keys():
        # one class instead of all, for an error that names the argument
        if isinstance(plain[name], dict) and len(_kinds(properties[name])) > 1:
            properties[name] = _section(properties[name], marks.get(name, plain[name]))
    validator = Draft202012Validator({**schema(), "properties": properties})
    error = best_match(validator.iter_errors(plain))
    if error is None:
        return None
    path = [str(part) for part in error.absolute_path]
    value = error.instance
    if error.validator != "additionalProperties" or not isinstance(value, dict):
        return Refusal(".".join(path), value, error.message, "Correct it")
    known = error.schema.get("properties", {})
    key = next(key for key in value if key not in known)
    section = path[-1] if path else "LLM(...)"
    near = difflib.get_close_matches(key, known, n=1)
    fix = f"Did you mean {near[0]}?" if near else f"Known: {', '.join(known)}"
    return Refusal(".".join([*path, key]), value[key], f"{section} has no such argument", fix)


class Section(dict[str, Any]):
    """Arguments by name, also as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass(frozen=True)
class LlmArgs:
    """Arguments of `LLM(...)`; attributes default to upstream's defaults."""

    version: ClassVar[str] = get_args(Version)[0]  # release
    given: dict[str, Any]  # values that are set, for `LLM(**...)`

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "given":  # during copying
            raise AttributeError(name)
        return getattr(self.complete, name)

    @cached_property
    def complete(self) -> Section:
        return _with_defaults(schema(), self.given)

    @property
    def drafts(self) -> int:
        """Draft tokens per round, 0 without speculation."""
        return self.value("speculative_config.max_draft_len") or 0

    def value(self, name: str) -> Any:
        """Return an argument by its dotted name; None if its section is null."""
        value: Any = self.complete
        for part in name.split("."):
            value = getattr(value, part, None)
        return value

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.given, sort_keys=False, allow_unicode=True)


def _with_defaults(node: Schema, given: Mapping[str, Any]) -> Section:
    complete = Section()
    for name, row in node["properties"].items():
        value = given.get(name, row.get("default"))
        if name not in given and "default" not in row and _kinds(row):
            value = {}  # a section without a default is made by upstream
        inner = _section(row, value) if isinstance(value, Mapping) else None
        complete[name] = value if inner is None else _with_defaults(inner, value)
    return complete


def _kinds(row: Schema) -> list[Schema]:
    """Return the classes that a section may be of; none for a free-form value."""
    refs = [part["$ref"] for part in (row, *row.get("anyOf", ())) if "$ref" in part]
    return [schema()["$defs"][ref.rpartition("/")[2]] for ref in refs]


def _section(row: Schema, value: Mapping[str, Any]) -> Schema | None:
    """Return the class that a section's `decoding_type`, `algorithm` or `mode` names, or any."""
    kinds = _kinds(row)
    for kind in kinds:
        marks = {
            name: part["const"] for name, part in kind["properties"].items() if "const" in part
        }
        if all(value.get(name, mark) == mark for name, mark in marks.items()):
            return kind
    return kinds[0] if kinds else None

"""The arguments of TensorRT-LLM's `LLM(...)`, as arguments.yaml has them.

Names of arguments in sections are dotted: "kv_cache_config.dtype".
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Annotated, Any, Literal, get_args, get_type_hints

import yaml
from pydantic import BaseModel, ConfigDict, Field, create_model

from dflash_trt.config import Method, Version
from dflash_trt.errors import EngineError

VERSIONS: tuple[Version, ...] = get_args(Version)  # oldest first
ROOT = "TorchLlmArgs"  # upstream's class of the arguments that lie in no section
SPECULATIVE = "SpeculativeConfig"  # stands for the class of the method
SPECULATIVE_OF: dict[Method, str] = {
    "dflash": "DFlashDecodingConfig",
    "lilicorr": "DFlashDecodingConfig",  # upstream tells them apart by the checkpoint
    "eagle3": "Eagle3DecodingConfig",
    "draft_model": "DraftTargetDecodingConfig",
    "ngram": "NGramDecodingConfig",
}


class Upstream(BaseModel):
    """As in upstream's `StrictBaseModel` an unknown key is an error; nor are types coerced."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


@dataclass(frozen=True, kw_only=True)
class Argument:
    """A row of the table, whose head explains the fields."""

    type: str | list[str | None]
    section: str = ""  # the class of what is in it
    default: Any = None
    required: bool = False
    limits: Mapping[str, Any] = field(default_factory=dict)
    status: Literal["stable", "beta", "prototype", "deprecated"] = "stable"
    since: Version = VERSIONS[0]
    values_since: Mapping[str, Version] = field(default_factory=dict)
    keys: list[str] | None = None
    keys_by_algorithm: Mapping[str, list[str]] | None = None


def read_table(name: str) -> Any:
    """A YAML file of this package."""
    return yaml.safe_load(files(__package__).joinpath(name).read_text("utf-8"))


@cache
def classes() -> dict[str, dict[str, Argument]]:
    """Arguments by upstream's class and their names in it; SPECULATIVE has those of all methods."""
    rows: dict[str, dict[str, dict[str, Any]]] = read_table("arguments.yaml")["classes"]
    rows[SPECULATIVE] = {}
    for name in SPECULATIVE_OF.values():
        rows[SPECULATIVE] = rows[name] | rows[SPECULATIVE]

    def section(row: Mapping[str, Any]) -> str:
        kind = str(row["type"]).removesuffix(" | None")
        return kind if kind in rows else ""

    return {
        name: {key: Argument(section=section(row), **row) for key, row in own.items()}
        for name, own in rows.items()
    }


def class_of(name: str, method: Method) -> str:
    """Upstream's class in place of SPECULATIVE; SPECULATIVE itself without drafts."""
    return SPECULATIVE_OF.get(method, name) if name == SPECULATIVE else name


@cache
def llm_args_class(method: Method) -> type[Upstream]:
    """Upstream's `TorchLlmArgs` with the classes of its sections."""
    names: dict[str, Any] = {"Annotated": Annotated, "Any": Any, "Field": Field, "Literal": Literal}
    names |= _types(read_table("arguments.yaml")["types"], names)
    for name, own in classes().items():
        if name == SPECULATIVE:
            continue
        if name == ROOT:
            names[SPECULATIVE] = names.get(class_of(SPECULATIVE, method), type(None))
        types = _types({key: argument.type for key, argument in own.items()}, names)
        fields: dict[str, Any] = {}
        for key, argument in own.items():
            options = dict(argument.limits)
            if argument.default == {}:
                options["default_factory"] = names.get(argument.section, dict)
            elif not argument.required:
                options["default"] = argument.default
            fields[key] = (types[key], Field(**options))
        names[name] = create_model(name, __base__=Upstream, **fields)
    found: type[Upstream] = names[ROOT]
    return found


def _types(written: Mapping[str, str | list[str | None]], names: dict[str, Any]) -> dict[str, Any]:
    """The types by key: annotations, and lists of all values."""

    def annotation(kind: str | list[str | None]) -> Any:
        if isinstance(kind, str):
            return kind
        values: Any = Literal[tuple(each for each in kind if each is not None)]
        return values | None if None in kind else values

    annotations = {key: annotation(kind) for key, kind in written.items()}
    holder = type("Holder", (), {"__annotations__": annotations})
    return get_type_hints(holder, names, include_extras=True)


@dataclass(frozen=True)
class Chosen:
    """One argument and why it is as it is."""

    argument: str  # of LLM(...), dotted
    value: Any
    why: str
    source: str


@dataclass(frozen=True)
class LlmArgs:
    """`LLM(...)`'s arguments; each is an attribute, upstream's default where it is not set."""

    version: Version  # of TensorRT-LLM, that they are typed for
    chosen: tuple[Chosen, ...]  # what is set, as the rules come; overrides without a rule last
    typed: Upstream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.typed, name)

    @property
    def drafts(self) -> int:
        """Draft tokens of a round, 0 without speculation."""
        return self.value("speculative_config.max_draft_len") or 0

    def value(self, name: str) -> Any:
        """An argument by its dotted name; None where the section that it is in is null."""
        found: Any = self.typed
        for part in name.split("."):
            found = getattr(found, part, None)
        return found

    def to_dict(self) -> dict[str, Any]:
        """What is set, ready for `LLM(**...)`."""
        return self.typed.model_dump(exclude_unset=True)

    def to_yaml(self) -> str:
        """The same as a file, for `TorchLlmArgs.from_yaml` and `trtllm-serve --config`."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)


def typed_args(version: str, given: Mapping[str, Any]) -> LlmArgs:
    """Those of a bundle; EngineError where the version is none that is known here."""
    if version not in VERSIONS:
        raise EngineError(
            f"the bundle is for TensorRT-LLM {version}, which is not known here",
            "Use the dflash-trt that built it",
        )
    kind = (given.get("speculative_config") or {}).get("decoding_type")
    types = {name: method for method, name in SPECULATIVE_OF.items()}
    return LlmArgs(
        version,
        (),
        llm_args_class(types.get(f"{kind}DecodingConfig", "none")).model_validate(given),
    )


def find(name: str) -> Argument:
    """An argument by its dotted name."""
    *sections, last = name.split(".")
    inside = ROOT
    for section in sections:
        inside = classes()[inside][section].section
    return classes()[inside][last]


def has(version: Version, first: Version) -> bool:
    """Whether `version` is `first` or later."""
    return VERSIONS.index(version) >= VERSIONS.index(first)


def walk(
    values: Mapping[str, Any], inside: str = ROOT, at: str = ""
) -> Iterator[tuple[str, str, str, Any]]:
    """Each key of nested arguments: its dotted name, the class that it is in, the key, its value.

    A key that the class does not have is given, too.
    """
    for key, value in values.items():
        yield f"{at}{key}", inside, key, value
        argument = classes()[inside].get(key)
        if argument and argument.section and isinstance(value, Mapping):
            yield from walk(value, argument.section, f"{at}{key}.")


def flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted name; what is no section, or an empty one, is whole."""
    return {
        name: value
        for name, inside, key, value in walk(values)
        if not (classes()[inside][key].section and isinstance(value, Mapping) and value)
    }


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """The reverse of `flatten`."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        *sections, last = name.split(".")
        inner = found
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = {} if value == {} else value  # others may go into it
    return found


def sections_with_keys() -> list[str]:
    """Sections that are handed on as they are, and whose keys are known."""

    def inside(name: str, at: str) -> Iterator[str]:
        for key, argument in classes()[name].items():
            if argument.keys is not None or argument.keys_by_algorithm is not None:
                yield f"{at}{key}"
            if argument.section:
                yield from inside(argument.section, f"{at}{key}.")

    return list(inside(ROOT, ""))

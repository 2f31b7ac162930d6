"""The build config: the one schema a user writes, as YAML."""

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from dflash_trt.errors import ConfigError

PLANNED_KINDS = ("tensorrt", "tensorrt_llm")
Count = Annotated[int, Field(ge=1, strict=True)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Source(Section):
    """Where a checkpoint lies."""

    path: Path = Field(
        description="Hugging Face directory; absolute, or relative to the config file"
    )


class Engine(Section):
    """What runs the two models."""

    kind: Literal["onnxruntime"] = Field(default="onnxruntime", description="onnxruntime: any CPU")
    threads: Count = Field(default=2, description="CPU threads of one engine call")

    @field_validator("kind", mode="before")
    @classmethod
    def _kind_is_built(cls, kind: object) -> object:
        if kind in PLANNED_KINDS:
            raise PydanticCustomError(
                "not_built", "engine kind '{kind}' is not built yet", {"kind": kind}
            )
        return kind


class Speculation(Section):
    """How much the drafter proposes."""

    draft_tokens: Count | None = Field(
        default=None,
        description="draft tokens of a round, at most block size - 1; unset: chosen by "
        "measured cost while serving",
    )


class Serving(Section):
    """What the server holds at a time."""

    slots: Count = Field(default=4, description="sequences decoded together")
    max_seq_len: Count | None = Field(
        default=None,
        description="prompt and generated tokens of one sequence; unset: the target's "
        "max_position_embeddings, at most 4096",
    )
    prefill_chunk: Count = Field(default=256, description="prompt tokens of one prefill step")
    max_queue: Annotated[int, Field(ge=0, strict=True)] = Field(
        default=64, description="requests that wait for a slot before new ones are refused"
    )


class BuildConfig(Section):
    """A deployment of one target with its DFlash drafter."""

    name: str = Field(
        pattern=r"^[a-z0-9][a-z0-9._-]*$", description="names the build; the default output folder"
    )
    target: Source = Field(description="the model whose output distribution is kept")
    drafter: Source = Field(description="the target's DFlash drafter")
    engine: Engine = Engine()
    speculation: Speculation = Speculation()
    serving: Serving = Serving()


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a build config, for editors."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **BuildConfig.model_json_schema(),
    }


def load_config(path: Path) -> BuildConfig:
    """Read and check a config; source paths become absolute (relative ones start at its folder).

    Raises ConfigError naming the file, the line where there is one, the field and the fix.
    """
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
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
    if not isinstance(root, yaml.MappingNode) or not isinstance(data, dict):
        raise ConfigError(
            f"{path} does not hold a mapping of fields",
            "Start from build_configs/pycode.yaml: it needs name, target and drafter",
        )
    for line, key in _repeated_keys(root):
        raise ConfigError(f"{path}:{line}: '{key}' is given twice", "Keep one of the two")
    try:
        config = BuildConfig.model_validate(data)
    except ValidationError as error:
        raise _explain(path, root, error) from None
    folder = path.resolve().parent
    sources = {
        role: Source(path=(folder / getattr(config, role).path.expanduser()).resolve())
        for role in ("target", "drafter")
    }
    return config.model_copy(update=sources)


def _explain(path: Path, root: yaml.MappingNode, error: ValidationError) -> ConfigError:
    """The first complaint in the file's own order, with its line."""
    complaints = error.errors(include_url=False, include_input=True)
    first = min(complaints, key=lambda e: _line(root, e["loc"]))
    field = ".".join(str(part) for part in first["loc"])
    where = f"{path}:{_line(root, first['loc'])}"
    if first["type"] == "extra_forbidden":
        known = _fields(first["loc"][:-1])
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
    if first["type"] == "not_built":
        return ConfigError(f"{where}: {field}: {first['msg']}", "Use engine: {kind: onnxruntime}")
    if first["type"] == "model_type":
        message = f"it takes fields: {', '.join(_fields(first['loc']))}"
    else:
        message = first["msg"][0].lower() + first["msg"][1:]
    return ConfigError(
        f"{where}: {field} is {first['input']!r}, but {message}",
        f"Correct {field}; `dflash-trt schema` shows what each field takes",
    )


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


def _fields(loc: tuple[int | str, ...]) -> list[str]:
    model: type[BaseModel] = BuildConfig
    for part in loc:
        annotation = model.model_fields[str(part)].annotation
        assert isinstance(annotation, type)  # every section is a plain class
        model = annotation
    return list(model.model_fields)


def _repeated_keys(node: yaml.Node) -> Iterator[tuple[int, str]]:
    """(line, key) of keys that YAML would silently override."""
    if not isinstance(node, yaml.MappingNode):
        return
    seen: set[str] = set()
    for key, value in node.value:
        if key.value in seen:
            yield key.start_mark.line + 1, key.value
        seen.add(str(key.value))
        yield from _repeated_keys(value)

"""Base of the config's sections, and sources of checkpoints."""

import os
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError

Count = Annotated[int, Field(ge=1, strict=True)]
PLACES: list[JsonValue] = [{"required": ["path"]}, {"required": ["hub", "revision"]}]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Source(Section):
    """Source of a checkpoint: on this machine, or on the Hugging Face Hub at a revision."""

    model_config = ConfigDict(json_schema_extra={"oneOf": PLACES})
    places: ClassVar[tuple[str, ...]] = ("path", "hub")

    path: Path | None = Field(
        default=None, description="names a checkpoint directory, absolute or relative to this file"
    )
    hub: str | None = Field(
        default=None,
        pattern=r"^[\w.-]+/[\w.-]+$",
        description="names a model on the Hugging Face Hub, ORG/NAME",
    )
    revision: str | None = Field(
        default=None, min_length=1, description="with hub: selects a commit, tag or branch"
    )

    signed_by: Path | None = Field(
        default=None,
        description="with path: names the public key (PEM) whose signature, model.sig, the "
        "directory must have",
    )

    @model_validator(mode="after")
    def _is_one_place(self) -> Self:
        if sum(getattr(self, place) is not None for place in self.places) != 1:
            message = "give exactly one of {places}"
            raise PydanticCustomError("source", message, {"places": ", ".join(self.places)})
        if (self.hub is None) != (self.revision is None):
            raise PydanticCustomError("source", "revision goes with hub, and hub with revision")
        if self.signed_by is not None and self.path is None:
            raise PydanticCustomError("source", "signed_by goes with path")
        return self

    def pinned(self, commit: str | None) -> Self:
        """Return the source at its commit, because a branch may move; None: not on the Hub."""
        return self if commit is None else self.model_copy(update={"revision": commit})

    def below(self, folder: Path) -> Self:
        """Return the source with absolute paths; relative ones start at `folder`."""
        given = {"path": self.path, "signed_by": self.signed_by}
        paths = {name: absolute(folder, path) for name, path in given.items() if path}
        return self.model_copy(update=paths)


class TargetSource(Source):
    """Source of a target: as any checkpoint, or a GGUF file."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [*PLACES, {"required": ["gguf"]}]})
    places = ("path", "hub", "gguf")

    gguf: Path | None = Field(
        default=None,
        description="names a GGUF file, absolute or relative to this file (or to package)",
    )
    package: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z]\w*$",
        description="with gguf: names the installed Python package that holds the file",
    )

    @model_validator(mode="after")
    def _package_holds_a_file(self) -> Self:
        if self.package is not None and self.gguf is None:
            raise PydanticCustomError("source", "package goes with gguf")
        return self

    def below(self, folder: Path) -> Self:
        if self.gguf is None or self.package is not None:
            return super().below(folder)
        return self.model_copy(update={"gguf": absolute(folder, self.gguf)})


class DrafterSource(Source):
    """Source of a drafter, and the precision in which our own engine computes it."""

    quantize: Literal["int8", "int4", "none"] | None = Field(
        default=None,
        description="quantizes the drafter's linear layers, or none of them, whatever "
        "engine.quantize says of the target's (engine kind onnxruntime only); `build` measures the "
        "acceptance with it. Unset: as engine.quantize, and int8 beside a quantized GGUF file",
    )


def absolute(folder: Path, path: Path) -> Path:
    return (folder / os.path.expanduser(path)).resolve()

"""What the classes are made of."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

from dflash_trt.config import Version

VERSIONS: tuple[Version, ...] = get_args(Version)  # oldest first


class Upstream(BaseModel):
    """As in upstream's `StrictBaseModel` an unknown key is an error; nor are types coerced."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


@dataclass(frozen=True)
class Since:
    """The first version that a field, or one `value` of it, is known from."""

    version: Version
    value: str | None = None


@dataclass(frozen=True)
class Status:
    """Upstream's mark for how firm an argument is; without one it is stable."""

    name: Literal["beta", "prototype", "deprecated"]


BETA, PROTOTYPE, DEPRECATED = Status("beta"), Status("prototype"), Status("deprecated")
RC27, RC140 = Since("1.3.0rc27"), Since("1.4.0rc1")

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Object = dict[str, Any]  # a section that is handed on as it is


def since(field: FieldInfo, value: object = None) -> Version:
    """The version that a field, or its `value`, is known from."""
    marks = [mark for mark in field.metadata if isinstance(mark, Since)]
    own = [m.version for m in marks if m.value is None]
    return next((m.version for m in marks if m.value == value), own[0] if own else VERSIONS[0])


def has(version: Version, first: Version) -> bool:
    """Whether `version` is `first` or later."""
    return VERSIONS.index(version) >= VERSIONS.index(first)


def nested(field: FieldInfo) -> type[Upstream] | None:
    """The class of a field that is a section."""
    for kind in (field.annotation, *get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, Upstream):
            return kind
    return None

"""What every part of the build config is made of."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1, strict=True)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

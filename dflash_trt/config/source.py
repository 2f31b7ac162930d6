"""Where a checkpoint lies."""

from pathlib import Path

from pydantic import ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from dflash_trt.config.section import Section


class Source(Section):
    """Where a checkpoint lies: on this machine, or on the Hugging Face Hub at a revision."""

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [{"required": ["path"]}, {"required": ["hub", "revision"]}]}
    )

    path: Path | None = Field(
        default=None, description="Hugging Face directory; absolute, or relative to the config file"
    )
    hub: str | None = Field(
        default=None, pattern=r"^[\w.-]+/[\w.-]+$", description="id of a model on the Hub, ORG/NAME"
    )
    revision: str | None = Field(
        default=None, min_length=1, description="with hub: a commit, tag or branch"
    )

    @model_validator(mode="after")
    def _is_one_place(self) -> "Source":
        if (self.path is None) == (self.hub is None):
            raise PydanticCustomError("source", "give either path or hub")
        if (self.hub is None) != (self.revision is None):
            raise PydanticCustomError("source", "revision goes with hub, and hub with revision")
        return self

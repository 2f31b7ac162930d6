"""The words that a build, a server and its clients share.

A build passes `Settings` to the model `dflash` in its config.pbtxt's parameters.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dflash_trt.config import Speculation
from dflash_trt.engines import most_verified
from dflash_trt.errors import BuildError
from dflash_trt.tensorrt_llm import KIND

# request parameter that asks for errors as "CODE: message": a gRPC stream carries a text alone
CODED_ERRORS = "coded_errors"
# Triton's APIs that always need a key
CHANGES = ("model-repository", "shared-memory", "trace", "logging")
Count = Annotated[int, Field(ge=1)]
Size = Annotated[int, Field(ge=0)]


class Settings(BaseModel):
    """Parameters by field name: text as it is, everything else as JSON."""

    model_config = ConfigDict(frozen=True)

    tokenizer: str  # directory, relative to the model's folder
    engines: str  # likewise
    eos_token_ids: frozenset[int]
    slots: Count
    max_queue: Size
    max_seq_len: Count
    prefill_chunk: Size
    block_size: Count
    speculation: Speculation
    mode: Literal["ensemble", "in_process", "tensorrt_llm"]
    max_per_client: Count | None = None
    prefix_cache: Size = 0  # MiB
    sampling: dict[str, int | float] = {}  # defaults of requests

    @property
    def max_draft_tokens(self) -> int:
        return max_draft_tokens(self.speculation, self.block_size, self.mode == KIND)

    def to_parameters(self) -> dict[str, str]:
        """Return strings, the only type of Triton's parameters."""
        return as_parameters(self.model_dump(mode="json"))

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str]) -> "Settings":
        """Parse parameters; BuildError if one is missing or invalid."""
        values: dict[str, Any] = dict(parameters)
        for name, text in parameters.items():
            with suppress(ValueError, RecursionError):  # a text is no JSON
                values[name] = json.loads(text)
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise BuildError(
                "the parameters in the config.pbtxt of model dflash are wrong "
                f"({place}: {first['msg']})",
                "Run `dflash-trt build` again",
            ) from error


def as_parameters(values: Mapping[str, Any]) -> dict[str, str]:
    return {
        name: value if isinstance(value, str) else json.dumps(value, sort_keys=True)
        for name, value in values.items()
    }


def max_draft_tokens(speculation: Speculation, block_size: int, tensorrt_llm: bool) -> int:
    """Return the most draft tokens of a sequence that a round verifies."""
    if speculation.method == "none":
        return 0
    if tensorrt_llm or (speculation.policy == "fixed" and speculation.method != "ngram"):
        return block_size - 1
    return most_verified(block_size) - 1

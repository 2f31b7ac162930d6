"""Settings that a build passes to the model `dflash` in its config.pbtxt's parameters."""

import json
from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from dflash_trt.config import Speculation
from dflash_trt.engines import most_verified
from dflash_trt.errors import BuildError
from dflash_trt.tensorrt_llm import KIND

# request parameter for errors as "CODE: message": in a gRPC stream errors have no code
CODED_ERRORS = "coded_errors"


def _read(value: Any) -> Any:
    return Speculation.model_validate_json(value) if isinstance(value, str) else value


Count = Annotated[int, Field(ge=1)]
Size = Annotated[int, Field(ge=0)]
Ids = Annotated[
    frozenset[int], BeforeValidator(lambda ids: ids.split() if isinstance(ids, str) else ids)
]
Sampling = Annotated[
    dict[str, int | float],
    BeforeValidator(lambda value: json.loads(value) if isinstance(value, str) else value),
]
Limit = Annotated[Count | None, BeforeValidator(lambda value: None if value == "" else value)]


@dataclass(frozen=True)
class Settings:
    """Parameters by field name; `to_parameters` and `from_parameters` are inverse."""

    tokenizer: str  # directory, relative to the model's folder
    engines: str  # likewise
    eos_token_ids: Ids
    slots: Count
    max_queue: Size
    max_seq_len: Count
    prefill_chunk: Size
    block_size: Count
    speculation: Annotated[Speculation, BeforeValidator(_read)]
    mode: Literal["ensemble", "in_process", "tensorrt_llm"]
    max_per_client: Limit = None
    prefix_cache: Size = 0  # MiB
    sampling: Sampling = field(default_factory=dict)  # defaults of requests

    @property
    def max_draft_tokens(self) -> int:
        return max_draft_tokens(self.speculation, self.block_size, self.mode == KIND)

    def to_parameters(self) -> dict[str, str]:
        """Return strings, the only type of Triton's parameters."""
        return {
            **{name: str(value) for name, value in vars(self).items() if not name.startswith("_")},
            "eos_token_ids": " ".join(map(str, sorted(self.eos_token_ids))),
            "speculation": self.speculation.model_dump_json(),
            "max_per_client": str(self.max_per_client or ""),
            "sampling": json.dumps(self.sampling),
        }

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str]) -> "Settings":
        """Parse parameters; BuildError if one is missing or invalid."""
        try:
            return TypeAdapter(cls).validate_python(dict(parameters))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise BuildError(
                "the parameters in the config.pbtxt of model dflash are wrong "
                f"({place}: {first['msg']})",
                "Run `dflash-trt build` again",
            ) from error


def max_draft_tokens(speculation: Speculation, block_size: int, tensorrt_llm: bool) -> int:
    """Return the most draft tokens of a sequence that a round verifies.

    tensorrt_llm: whether TensorRT-LLM runs the rounds.
    """
    if speculation.method == "none":
        return 0
    if tensorrt_llm or (speculation.policy == "fixed" and speculation.method != "ngram"):
        return block_size - 1
    return most_verified(block_size) - 1

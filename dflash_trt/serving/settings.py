"""What the build tells the front model, through the parameters of its config.pbtxt."""

from collections.abc import Mapping
from dataclasses import dataclass

from dflash_trt.config.build import Speculation
from dflash_trt.engines.info import most_verified
from dflash_trt.errors import BuildError
from dflash_trt.tensorrt_llm.info import KIND

# the request parameter by which a client asks for "CODE: message" errors: in a gRPC stream errors
# have no code of their own
CODED_ERRORS = "coded_errors"
COUNTS = ("slots", "max_seq_len", "block_size")  # what is at least 1
NUMBERS = (*COUNTS, "max_queue", "prefill_chunk")
MODES = ("ensemble", "in_process", KIND)


@dataclass(frozen=True)
class Settings:
    """Field names are the parameter names; `to_parameters` and `from_parameters` are inverse."""

    tokenizer: str  # directory, relative to the model's folder
    engines: str  # the same
    eos_token_ids: frozenset[int]
    slots: int
    max_queue: int
    max_seq_len: int
    prefill_chunk: int
    block_size: int
    speculation: Speculation
    mode: str  # "ensemble", "in_process" or "tensorrt_llm"
    max_per_client: int | None = None

    @property
    def most_drafts(self) -> int:
        """See the function."""
        return most_drafts(self.speculation, self.block_size, self.mode == KIND)

    def to_parameters(self) -> dict[str, str]:
        """As strings, all that Triton's parameters can hold."""
        return {
            "tokenizer": self.tokenizer,
            "engines": self.engines,
            "mode": self.mode,
            "eos_token_ids": " ".join(map(str, sorted(self.eos_token_ids))),
            "speculation": self.speculation.model_dump_json(),
            "max_per_client": str(self.max_per_client or ""),
            **{name: str(getattr(self, name)) for name in NUMBERS},
        }

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str]) -> "Settings":
        """BuildError where one is missing or wrong."""
        try:
            settings = cls(
                tokenizer=parameters["tokenizer"],
                engines=parameters["engines"],
                mode=parameters["mode"],
                eos_token_ids=frozenset(map(int, parameters["eos_token_ids"].split())),
                speculation=Speculation.model_validate_json(parameters["speculation"]),
                slots=int(parameters["slots"]),
                max_queue=int(parameters["max_queue"]),
                max_seq_len=int(parameters["max_seq_len"]),
                prefill_chunk=int(parameters["prefill_chunk"]),
                block_size=int(parameters["block_size"]),
                max_per_client=int(parameters.get("max_per_client") or 0) or None,
            )
            small = [name for name in NUMBERS if getattr(settings, name) < (name in COUNTS)]
            if small or (settings.max_per_client or 1) < 1:
                raise ValueError("a number is too small")
            if settings.mode not in MODES:
                raise ValueError(f"there is no mode {settings.mode!r}")
        except (KeyError, ValueError) as error:
            raise BuildError(
                f"the parameters in the config.pbtxt of model dflash are wrong ({error})",
                "Run `dflash-trt build` again",
            ) from error
        return settings


def most_drafts(speculation: Speculation, block_size: int, tensorrt_llm: bool) -> int:
    """Drafts that a round may verify of a sequence; tensorrt_llm: by it, not by engines of ours."""
    if speculation.policy == "fixed" or tensorrt_llm:
        return block_size - 1
    return most_verified(block_size) - 1

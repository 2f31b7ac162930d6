"""`engine.quantize` of a bundle: in which precision TensorRT-LLM computes the target."""

from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, model_validator

from dflash_trt.config.section import Count, Section

Share = Annotated[float, Field(ge=0, le=1)]
Precision = Literal["fp8", "nvfp4", "w4a8", "w4a16"]


class Calibration(Section):
    """The texts that the ranges of activations are measured on, and the rest that judges."""

    prompts: Path | None = Field(
        default=None,
        description="names a file of prompts as `verify` takes it, absolute or relative to this "
        "file; unset: pages of Python's own documentation",
    )
    tokens: Count = Field(default=256, description="cuts each text to so many tokens")
    seed: int = Field(default=0, description="chooses the texts, and those that are held out")


class Quantize(Section):
    """Precision of the target's linear layers; embedding, head and norms stay as they are."""

    method: Precision = Field(
        description="fp8: weights and activations in e4m3, a scale for each matrix; nvfp4: in "
        "e2m1, a scale for 16 numbers; w4a8, w4a16: weights in int4 by AWQ, a scale for 128, "
        "activations in e4m3 or as they are"
    )
    kv_cache: Literal["none", "fp8"] = Field(
        default="none", description="fp8: also calibrate scales of an FP8 KV cache"
    )
    calibration: Calibration = Field(
        default=Calibration(), description="selects the texts that ranges are measured on"
    )
    max_acceptance_loss: Share = Field(
        default=0.05,
        description="fails the build if tau, the tokens of a round, falls by a larger share",
    )

    @model_validator(mode="before")
    @classmethod
    def _method_alone(cls, given: Any) -> Any:
        return {"method": given} if isinstance(given, str) else given


def or_method_alone(schema: dict[str, Any]) -> None:
    """In the JSON Schema of a field that holds the section."""
    schema["anyOf"].append({"enum": list(get_args(Precision))})

"""Sections of the config: sources of checkpoints, and engines by `kind`, with their methods."""

import os
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    JsonValue,
    Tag,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from dflash_trt.errors import ConfigError
from dflash_trt.planning import Machine, machine

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

    @model_validator(mode="after")
    def _is_one_place(self) -> Self:
        if sum(getattr(self, place) is not None for place in self.places) != 1:
            message = "give exactly one of {places}"
            raise PydanticCustomError("source", message, {"places": ", ".join(self.places)})
        if (self.hub is None) != (self.revision is None):
            raise PydanticCustomError("source", "revision goes with hub, and hub with revision")
        return self

    def pinned(self, commit: str | None) -> Self:
        """Return the source at its commit, because a branch may move; None: not on the Hub."""
        return self if commit is None else self.model_copy(update={"revision": commit})

    def below(self, folder: Path) -> Self:
        """Return the source with an absolute path; a relative one starts at `folder`."""
        return self.model_copy(update={"path": absolute(folder, self.path)} if self.path else {})


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


def absolute(folder: Path, path: Path) -> Path:
    return (folder / os.path.expanduser(path)).resolve()


Method = Literal["dflash", "eagle3", "ngram", "none"]
DRAFTERLESS: tuple[Method, ...] = ("ngram", "none")

Version = Literal["1.4.0rc1"]  # the only TensorRT-LLM release whose arguments are known

# TensorRT-RTX 1.7 supports more, which do not compute in bfloat16
Capability = Literal["8.0", "8.6", "8.9", "12.0", "12.1"]


class OnnxRuntime(Section):
    """Graphs on any CPU, or by the CUDA provider."""

    kind: Literal["onnxruntime"] = Field(
        default="onnxruntime", description="onnxruntime: run on any CPU"
    )
    device: Literal["cpu", "cuda"] = Field(
        default="cpu",
        description="cpu: run on the CPU; cuda: run the same file on one NVIDIA GPU, by ONNX "
        "Runtime's CUDA provider",
    )
    threads: Count | None = Field(
        default=None,
        description="sets the CPU threads of one engine call; unset: as many as the "
        "machine, or its container, has cores where the build runs",
    )
    quantize: Literal["int8", "int4", "none"] | None = Field(
        default=None,
        description="quantizes the target's linear layers to int8 or int4, one scale for 32 "
        "weights, and the drafter's to int8. none: the checkpoint's precision. Unset: as none, but "
        "a quantized GGUF file keeps its blocks, with a drafter in int8",
    )

    @model_validator(mode="after")
    def _cuda_is_exact(self) -> "OnnxRuntime":
        if self.device == "cuda" and self.quantize not in (None, "none"):
            raise PydanticCustomError(
                "one_gpu",
                "device: cuda runs in the checkpoint's precision; leave out quantize",
            )
        return self


class TensorRT(Section):
    """Plans built from the same graphs."""

    kind: Literal["tensorrt"] = Field(description="tensorrt: run on NVIDIA GPUs")
    library: Literal["tensorrt", "tensorrt_rtx"] = Field(
        description="tensorrt: build with TensorRT 11 for the GPU of this machine; tensorrt_rtx: "
        "build with TensorRT for RTX 1.7, which needs no GPU"
    )
    dtype: Literal["bf16", "fp16"] = Field(
        default="bf16", description="sets the type of weights, matrix products and KV caches"
    )
    tensor_parallel_size: Literal[1, 2, 4, 8] = Field(
        default=1,
        description="shards the models over this many GPUs, a plan for each; `serve` runs those "
        "of one",
    )
    compute_capabilities: list[Capability] | None = Field(
        default=None,
        min_length=1,
        description="selects the GPUs that a tensorrt_rtx plan runs on; unset: all of these",
    )

    @field_validator("compute_capabilities", mode="before")
    @classmethod
    def _as_text(cls, values: object) -> object:
        """Convert to strings, because YAML reads 8.9 as a number."""
        return [str(value) for value in values] if isinstance(values, list) else values

    @model_validator(mode="after")
    def _library_has_a_choice(self) -> "TensorRT":
        if self.library == "tensorrt" and self.compute_capabilities is not None:
            raise PydanticCustomError(
                "one_gpu",
                "tensorrt builds for the GPU that it finds; compute_capabilities are for "
                "tensorrt_rtx",
            )
        return self


Precision = Literal["fp8", "nvfp4"]


class TensorRTLLM(Section):
    """A bundle for TensorRT-LLM's PyTorch backend."""

    kind: Literal["tensorrt_llm"] = Field(
        description="tensorrt_llm: run on NVIDIA GPUs, one or many"
    )
    version: Version = Field(
        default="1.4.0rc1", description="selects the TensorRT-LLM release to check and write for"
    )
    hardware: Annotated[
        Annotated[str, Tag("name")] | Annotated[Machine, Tag("machine")],
        Discriminator(lambda given: "name" if isinstance(given, str) else "machine"),
    ] = Field(
        default="dgx-b300",
        description="names a preset (`dflash-trt plan`), or describes your machine",
    )
    gpus: Count | None = Field(
        default=None, description="sets the GPUs of one instance; unset: all of the machine"
    )
    objective: Literal["latency", "throughput", "balanced"] = Field(
        default="balanced",
        description="latency: answer one request fastest; throughput: generate most tokens/s in "
        "all; balanced: a compromise",
    )
    concurrency: Count | None = Field(
        default=None,
        description="sets how many sequences run at once; unset: by objective and memory",
    )
    checkpoints: Literal["copy", "hub"] = Field(
        default="copy",
        description="copy: store both checkpoints in the bundle; hub: fetch the target by id and "
        "revision where it runs, and copy the drafter",
    )
    quantize: Precision | None = Field(
        default=None,
        description="quantizes the target's linear layers with ModelOpt (extra `quantize`), and "
        "measures what that costs. fp8: weights and activations in e4m3, a scale for each matrix; "
        "nvfp4: in e2m1, a scale for 16 numbers. Unset: keep the checkpoint's precision",
    )
    calibration: Path | None = Field(
        default=None,
        description="with quantize: names a file of prompts as `verify` takes it, absolute or "
        "relative to this file, on which ranges of activations are measured; unset: pages of "
        "Python's own documentation",
    )
    args: dict[str, Any] = Field(
        default={},
        description="overrides arguments of TensorRT-LLM's `LLM(...)`, by their names and nesting "
        "there",
    )

    @field_validator("hardware")
    @classmethod
    def _is_known(cls, hardware: str | Machine) -> str | Machine:
        try:
            machine(hardware)
        except ConfigError as error:
            raise PydanticCustomError("machine", "{said}", {"said": error.problem}) from None
        return hardware

    @model_validator(mode="after")
    def _quantized_here(self) -> "TensorRTLLM":
        if self.calibration is not None and self.quantize is None:
            raise PydanticCustomError("calibration", "calibration goes with quantize")
        if self.quantize is not None and self.checkpoints == "hub":
            raise PydanticCustomError(
                "quantized_here",
                "checkpoints: hub leaves the target on the Hub, but quantize writes another one; "
                "take copy",
            )
        return self


def methods_of(engine: OnnxRuntime | TensorRT | TensorRTLLM) -> tuple[Method, ...]:
    """Return the decoding methods of an engine kind."""
    if isinstance(engine, TensorRTLLM):
        return ("dflash", "eagle3", *DRAFTERLESS)
    if isinstance(engine, OnnxRuntime):
        return ("dflash", *DRAFTERLESS)
    return ("dflash", "none")

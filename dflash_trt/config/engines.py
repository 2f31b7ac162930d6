"""What runs the two models: a section for each engine kind, chosen by `kind`."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator
from pydantic_core import PydanticCustomError

from dflash_trt.config.section import Count, Section
from dflash_trt.errors import ConfigError
from dflash_trt.roofline import Machine, machine

# TensorRT-LLM's releases with DFlash and without the TensorRT backend (PyPI), oldest first
Version = Literal[
    "1.3.0rc22",
    "1.3.0rc22.post1",
    "1.3.0rc23",
    "1.3.0rc23.post1",
    "1.3.0rc24",
    "1.3.0rc25",
    "1.3.0rc26",
    "1.3.0rc27",
    "1.3.0rc28",
    "1.3.0rc29",
    "1.4.0rc0",
    "1.4.0rc1",
]

# of those that TensorRT-RTX 1.7 builds for, the ones that compute in bfloat16
Capability = Literal["8.0", "8.6", "8.9", "12.0", "12.1"]


class Sharded(Section):
    """Kinds whose engines several ranks can compute together."""

    tensor_parallel_size: Literal[1, 2, 4, 8] = Field(
        default=1,
        description="ranks that the models are cut for: processes on CPUs, each with its threads, "
        "or GPUs",
    )
    shard_drafter: bool = Field(
        default=True,
        description="whether the drafter is cut for the ranks too; else rank 0 runs all of it, "
        "which is quicker for a small one",
    )

    @property
    def drafter_ranks(self) -> int:
        return self.tensor_parallel_size if self.shard_drafter else 1


class OnnxRuntime(Sharded):
    """Graphs on any CPU."""

    kind: Literal["onnxruntime"] = Field(default="onnxruntime", description="onnxruntime: any CPU")
    threads: Count = Field(default=2, description="CPU threads of one engine call, on each rank")
    weights: Literal["copy", "link"] = Field(
        default="copy",
        description="copy: the build stands alone; link: it reads what it can from the original "
        "checkpoint files, which must stay as they are; saves disk, loads more slowly",
    )
    quantize: Literal["int8", "int4"] | None = Field(
        default=None,
        description="linear layers in int8 or int4, 32 weights with one scale; `build` measures "
        "what it costs in accuracy; unset: as the checkpoint has them",
    )


class TensorRT(Sharded):
    """Plans built from the same graphs."""

    kind: Literal["tensorrt"] = Field(description="tensorrt: NVIDIA GPUs")
    library: Literal["tensorrt", "tensorrt_rtx"] = Field(
        description="tensorrt: TensorRT 11, for the GPU of the machine that builds; tensorrt_rtx: "
        "TensorRT for RTX 1.7, which needs no GPU to build"
    )
    dtype: Literal["bf16", "fp16"] = Field(
        default="bf16", description="of weights, products and KV caches; the rest is in fp32"
    )
    compute_capabilities: list[Capability] | None = Field(
        default=None,
        min_length=1,
        description="of the GPUs that a plan of tensorrt_rtx is for; unset: all of these",
    )

    @field_validator("compute_capabilities", mode="before")
    @classmethod
    def _as_text(cls, values: object) -> object:
        """YAML reads 8.9 as a number."""
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


class TensorRTLLM(Section):
    """A bundle for TensorRT-LLM's PyTorch backend."""

    kind: Literal["tensorrt_llm"] = Field(description="tensorrt_llm: NVIDIA GPUs, many at once")
    version: Version = Field(
        default="1.4.0rc1", description="of TensorRT-LLM; arguments are written and checked for it"
    )
    hardware: Annotated[
        Annotated[str, Tag("name")] | Annotated[Machine, Tag("machine")],
        Discriminator(lambda given: "name" if isinstance(given, str) else "machine"),
    ] = Field(
        default="dgx-b300", description="a preset's name (`dflash-trt plan`), or your own machine"
    )

    gpus: Count | None = Field(
        default=None, description="GPUs that one instance takes; unset: all of the machine"
    )
    objective: Literal["latency", "throughput", "balanced"] = Field(
        default="balanced",
        description="latency: the quickest answer to one; throughput: the most tokens of all",
    )
    concurrency: Count | None = Field(
        default=None, description="sequences decoded together; unset: by objective and memory"
    )
    checkpoints: Literal["copy", "link", "hub"] = Field(
        default="copy",
        description="copy: the bundle stands alone; link: it points to the checkpoint files; "
        "hub: the target is fetched on the machine by its id and revision, the drafter is copied",
    )
    args: dict[str, Any] = Field(
        default={},
        description="arguments of TensorRT-LLM's `LLM(...)` by their own names, nested as there; "
        "they go over those that are chosen by rule",
    )

    @field_validator("hardware")
    @classmethod
    def _is_known(cls, hardware: str | Machine) -> str | Machine:
        try:
            machine(hardware)
        except ConfigError as error:
            raise PydanticCustomError("machine", "{said}", {"said": error.problem}) from None
        return hardware

"""The build config: the one schema a user writes, as YAML.

Sources of checkpoints, engines by `kind` with their methods, speculation, serving.
"""

import os
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from dflash_trt.config.graph_options import Bits, GraphOptions, Storage
from dflash_trt.engine_kinds import KINDS, EngineKind
from dflash_trt.errors import ConfigError
from dflash_trt.hardware import PRESETS, Machine, find_machine

Count = Annotated[int, Field(ge=1, strict=True)]
Mode = Literal["ensemble", "in_process"]
BITS: dict[str, Bits] = {"int4": 4, "int8": 8}
STORED = "stored"  # quantize: as the GGUF file is
PLACES = (("path",), ("hub", "revision"), ("gguf",))  # of a model, by required fields
OF_ROUNDS = {"mode", "slots", "prefill_chunk"}  # how our engines run rounds
RECOMPUTE_TAIL = "recompute_tail"  # value of serving.prefix_cache
# MiB: 3 or more chats of 2,000 tokens with models up to 8B, and less than their weights
PREFIX_CACHE = 1024
CHAIN = 3  # drafts of a model that makes them one at a time, as in upstream's examples


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _from_folder(path: Path, info: ValidationInfo) -> Path:
    """Make a path absolute: a relative one starts at the folder in the validation's context."""
    folder = (info.context or {}).get("folder")
    if folder is None or info.data.get("package") is not None:
        return path
    return Path(folder, os.path.expanduser(path)).resolve()


LocalPath = Annotated[Path, AfterValidator(_from_folder)]


class Source(Section):
    """Source of a model: a directory, the Hugging Face Hub at a revision, or a GGUF file."""

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [{"required": [*place]} for place in PLACES]}
    )

    path: LocalPath | None = Field(
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

    package: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z]\w*$",
        description="with gguf: names the installed Python package that holds the file",
    )
    gguf: LocalPath | None = Field(
        default=None,
        description="names a GGUF file, absolute or relative to this file (or to package)",
    )

    @model_validator(mode="after")
    def _is_one_place(self) -> Self:
        places = [place[0] for place in PLACES]
        if sum(getattr(self, place) is not None for place in places) != 1:
            message = "give exactly one of {places}"
            raise PydanticCustomError("source", message, {"places": ", ".join(places)})
        if (self.hub is None) != (self.revision is None):
            raise PydanticCustomError("source", "revision goes with hub, and hub with revision")
        if self.package is not None and self.gguf is None:
            raise PydanticCustomError("source", "package goes with gguf")
        return self

    def pinned(self, commit: str | None) -> Self:
        """Return the source at its commit, because a branch may move; None: not on the Hub."""
        return self if commit is None else self.model_copy(update={"revision": commit})


Method = Literal["dflash", "eagle3", "ngram", "none"]
DRAFTERLESS: tuple[Method, ...] = ("ngram", "none")

Version = Literal["1.4.0rc1"]  # the only TensorRT-LLM release whose arguments are known

# TensorRT-RTX 1.7 supports more, which do not compute in bfloat16
Capability = Literal["8.0", "8.6", "8.9", "12.0", "12.1"]


class GraphEngine(Section):
    """An engine made from graphs, whose rounds run here."""

    default_mode: ClassVar[Mode] = "ensemble"

    @property
    def options(self) -> GraphOptions:
        return GraphOptions()

    @property
    def keeps_all_blocks(self) -> bool:
        """Whether the blocks of a GGUF file are to stay as they are."""
        return False

    @property
    def extras(self) -> tuple[str, ...]:
        """Extras of this package that a server needs."""
        return ()

    def for_checkpoint(self, directory: Path, *, has_blocks: bool) -> Self:
        """Fill in what a target decides; ConfigError if it does not go with it.

        has_blocks: it is a quantized GGUF file.
        """
        return self


class OnnxRuntime(GraphEngine):
    """Graphs on any CPU."""

    methods: ClassVar[tuple[Method, ...]] = ("dflash", *DRAFTERLESS)

    kind: Literal["onnxruntime"] = Field(
        default="onnxruntime", description="onnxruntime: run on any CPU"
    )
    threads: Count | None = Field(
        default=None,
        description="sets the CPU threads of one engine call; unset: as many as the "
        "machine that serves, or its container, has cores",
    )
    quantize: Literal["int8", "int4", "stored", "none"] | None = Field(
        default=None,
        description="quantizes the target's linear layers to int8 or int4, one scale for 32 "
        "weights, and the drafter's to int8; blocks of a GGUF file with as few bits stay. stored: "
        "all blocks of a GGUF file stay, and nothing else is quantized but a drafter, to int8. "
        "none: compute in float32. Unset: stored for a quantized GGUF file, else none",
    )

    @property
    def options(self) -> GraphOptions:
        quantize = self.quantize or "none"
        storage = Storage(BITS.get(quantize), keep_blocks=quantize != "none")
        return GraphOptions(storage=storage, threads=self.threads)

    @property
    def keeps_all_blocks(self) -> bool:
        return self.quantize == STORED

    def for_checkpoint(self, directory: Path, *, has_blocks: bool) -> Self:
        if self.quantize is None and has_blocks:
            return self.model_copy(update={"quantize": STORED})
        if self.quantize == STORED and not has_blocks:
            raise ConfigError(
                f"engine.quantize is {STORED}, but {directory} is no quantized GGUF file",
                "Use int8, int4 or none, or leave it out",
            )
        return self


class PyTorch(GraphEngine):
    """Graphs on one NVIDIA GPU, by PyTorch and kernels of our own."""

    default_mode: ClassVar[Mode] = "in_process"
    methods: ClassVar[tuple[Method, ...]] = ("dflash", *DRAFTERLESS)

    kind: Literal["pytorch"] = Field(description="pytorch: run on one NVIDIA GPU")
    dtype: Literal["bfloat16", "float16", "float32"] = Field(
        default="bfloat16", description="sets the type of weights, matrix products and KV caches"
    )
    quantize: Literal["fp8"] | None = Field(
        default=None,
        description="fp8: store the linear layers of both models, but heads, gates and experts, in "
        "e4m3 with a scale for each output, for GPUs of 8.9 and newer. Unset: in dtype, or in e4m3 "
        "where the checkpoint has them so",
    )

    @property
    def options(self) -> GraphOptions:
        storage = Storage(fp8=self.quantize == "fp8", keep_fp8=True)
        return GraphOptions(storage=storage, dtype=self.dtype)

    @property
    def extras(self) -> tuple[str, ...]:
        return ("cuda",)


class TensorRT(GraphEngine):
    """Plans built from the same graphs."""

    methods: ClassVar[tuple[Method, ...]] = ("dflash", "none")

    kind: Literal["tensorrt"] = Field(description="tensorrt: run on NVIDIA GPUs")
    library: Literal["tensorrt", "tensorrt_rtx"] = Field(
        description="tensorrt: build with TensorRT 11 for the GPU of this machine; tensorrt_rtx: "
        "build with TensorRT for RTX 1.7, which needs no GPU"
    )
    dtype: Literal["bf16", "fp16"] = Field(
        default="bf16", description="sets the type of weights, matrix products and KV caches"
    )
    compute_capabilities: list[Capability] | None = Field(
        default=None,
        min_length=1,
        description="selects the GPUs that a tensorrt_rtx plan runs on; unset: all of these",
    )

    @property
    def extras(self) -> tuple[str, ...]:
        return ({"tensorrt_rtx": "rtx"}.get(self.library, self.library),)

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

    methods: ClassVar[tuple[Method, ...]] = ("dflash", "eagle3", *DRAFTERLESS)

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
    calibration: LocalPath | None = Field(
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
        if isinstance(hardware, str) and hardware not in PRESETS:
            message = "the presets are {presets}"
            raise PydanticCustomError("machine", message, {"presets": ", ".join(PRESETS)})
        return hardware

    @property
    def machine(self) -> Machine:
        return find_machine(self.hardware)

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


EngineConfig = Annotated[
    OnnxRuntime | PyTorch | TensorRT | TensorRTLLM, Field(discriminator="kind")
]


def no_effect(names: list[str], beside: str) -> PydanticCustomError:
    message = "{names} has no effect with {beside}"
    return PydanticCustomError("no_effect", message, {"names": ", ".join(names), "beside": beside})


class Speculation(Section):
    """Proposals of each round, and how many tokens of them are verified."""

    method: Method = Field(
        default="dflash",
        description="dflash: draft blocks with a DFlash drafter; eagle3: draft token by token with "
        "an EAGLE-3 head; ngram: propose what followed the same tokens earlier, without a drafter; "
        "none: decode plainly",
    )
    policy: Literal["adaptive", "fixed"] = Field(
        default="adaptive",
        description="adaptive: verify in each round what pays most by measured costs, which may be "
        "nothing; fixed: always verify draft_tokens of the drafter, as tensorrt_llm does. Default "
        "when draft_tokens is given: fixed",
    )
    draft_tokens: Count | None = Field(
        default=None,
        description="limits what the drafter drafts in a round; unset: block size - 1, the most "
        "possible. ngram: limits the copied tokens; unset: 15 (tensorrt_llm: 3, as of eagle3)",
    )
    lookup: bool = Field(
        default=True, description="adaptive: propose what followed the same tokens earlier"
    )

    @model_validator(mode="before")
    @classmethod
    def _fixed_by_a_number(cls, values: object) -> object:
        if not isinstance(values, dict):
            return values
        if values.get("draft_tokens") is not None or values.get("method") == "none":
            values = {"policy": "fixed"} | values
        return {"lookup": False} | values if values.get("policy") == "fixed" else values

    @model_validator(mode="after")
    def _has_an_effect(self) -> "Speculation":
        if self.method == "none" and (self.draft_tokens or self.lookup or self.policy != "fixed"):
            given = sorted(self.model_fields_set & {"policy", "draft_tokens", "lookup"})
            raise no_effect(given, "speculation.method none")
        if self.policy == "fixed" and self.lookup:
            raise no_effect(["lookup"], "speculation.policy fixed")
        return self


class Serving(Section):
    """Server behavior and limits."""

    mode: Mode = Field(
        default="ensemble",
        description="ensemble: run verify and draft as Triton models; in_process: run both engines "
        "inside the public model, faster for a small target. Default of engine kind pytorch: "
        "in_process",
    )
    slots: Count = Field(default=4, description="sets how many sequences are decoded together")
    max_seq_len: Count | None = Field(
        default=None,
        description="limits the tokens of one sequence, prompt included; unset: the smaller "
        "max_position_embeddings of target and drafter, at most 4096 (tensorrt_llm: 131072)",
    )
    prefill_chunk: Count = Field(
        default=256,
        description="sets how many prompt tokens one prefill step takes at most; beside sequences "
        "that decode as many as a round of theirs verifies, at least 128",
    )
    prefix_cache: Annotated[int, Field(ge=0, strict=True)] | Literal["recompute_tail"] | None = (
        Field(
            default=None,
            description="limits the MiB of KV cache that are kept of earlier texts, for prompts "
            f"that begin alike; 0: no reuse. Unset: {PREFIX_CACHE}. recompute_tail (engine kind "
            "tensorrt_llm only, which reuses nothing when this is unset): compute the last tokens "
            "of what is reused again, for the drafter",
        )
    )
    max_queue: Annotated[int, Field(ge=0, strict=True)] = Field(
        default=64, description="limits the requests that wait for a slot; more are refused"
    )
    max_per_client: Count | None = Field(
        default=None,
        description="limits the running and waiting sequences of one client; more are refused. "
        "Unset: no limit",
    )
    sampling_defaults: Literal["model", "none"] = Field(
        default="model",
        description="model: what generation_config.json recommends (temperature, top_k, top_p, "
        "min_p, repetition_penalty, max_new_tokens) is the default of a request's fields; none: "
        "the API's own defaults",
    )

    @property
    def prefix_cache_mib(self) -> int:
        return self.prefix_cache if isinstance(self.prefix_cache, int) else PREFIX_CACHE


class BuildConfig(Section):
    """A deployment of one target, usually with its DFlash drafter."""

    name: str = Field(
        pattern=r"^[a-z0-9][a-z0-9._-]*$",
        description="names the build and its default output folder",
    )
    target: Source = Field(description="selects the model whose output distribution is kept")
    drafter: Source | None = Field(
        default=None,
        description="selects the drafter trained for the target, of speculation.method; not needed "
        "for ngram and none",
    )
    drafters: dict[Method, Source] = Field(
        default={},
        description="selects drafters by speculation.method, where a config is for several: of one "
        "that is not here, `drafter` is taken",
    )
    package_lock: LocalPath | None = Field(
        default=None,
        description="pip requirements with hashes of every package of the image, made from an "
        "earlier build's requirements.txt; unset: versions without hashes",
    )
    engine: EngineConfig = OnnxRuntime()
    speculation: Speculation = Field(default=Speculation(), validate_default=True)
    serving: Serving = Field(default=Serving(), validate_default=True)

    @property
    def sources(self) -> dict[str, Source]:
        """Where the models come from, by role."""
        sources = {"target": self.target, "drafter": self.drafter}
        return {role: source for role, source in sources.items() if source is not None}

    @property
    def engine_kind(self) -> EngineKind:
        return KINDS[self.engine.kind]

    @property
    def llm(self) -> TensorRTLLM:
        """The engine; ConfigError unless its kind is tensorrt_llm."""
        if not isinstance(self.engine, TensorRTLLM):
            problem = f"engine.kind is {self.engine.kind}, which says nothing of GPUs"
            raise ConfigError(problem, "Use engine: {kind: tensorrt_llm}")
        return self.engine

    @field_validator("engine", mode="before")
    @classmethod
    def _has_a_kind(cls, engine: object) -> object:
        return {"kind": "onnxruntime"} | engine if isinstance(engine, dict) else engine

    @field_validator("drafters")
    @classmethod
    def _are_drafters(cls, drafters: dict[Method, Source]) -> dict[Method, Source]:
        if not drafters.keys().isdisjoint(DRAFTERLESS):
            raise PydanticCustomError("method", "ngram and none have no drafter")
        return drafters

    @field_validator("speculation")
    @classmethod
    def _has_its_drafter_and_engine(cls, given: Speculation, info: ValidationInfo) -> Speculation:
        fields, method = info.data, given.method  # without those that are invalid themselves
        drafterless = (*DRAFTERLESS, *fields.get("drafters", [method]))
        if method not in drafterless and fields.get("drafter", ...) is None:
            raise PydanticCustomError("no_drafter", "drafter is missing")
        engine = fields.get("engine")
        if engine is not None and method not in engine.methods:
            message = "of engine.kind {kind} the methods are {methods}"
            known = {"kind": engine.kind, "methods": ", ".join(engine.methods)}
            raise PydanticCustomError("method", message, known)
        if not isinstance(engine, TensorRTLLM):
            return given
        if "lookup" in given.model_fields_set and given.lookup:
            raise no_effect(["lookup"], "engine.kind tensorrt_llm")
        return given.model_copy(update={"lookup": False})

    @field_validator("serving")
    @classmethod
    def _goes_with_the_engine(cls, serving: Serving, info: ValidationInfo) -> Serving:
        if "engine" not in info.data:  # it is invalid itself
            return serving
        engine = info.data["engine"]
        by_llm = isinstance(engine, TensorRTLLM)
        if isinstance(engine, GraphEngine) and "mode" not in serving.model_fields_set:
            serving = serving.model_copy(update={"mode": engine.default_mode})
        if serving.prefix_cache == RECOMPUTE_TAIL and not by_llm:
            raise PydanticCustomError(
                "prefix_cache", "prefix_cache recompute_tail needs engine.kind tensorrt_llm"
            )
        if by_llm and isinstance(serving.prefix_cache, int):
            raise no_effect(["prefix_cache in MiB"], "engine.kind tensorrt_llm")
        if by_llm and (idle := sorted(OF_ROUNDS & serving.model_fields_set)):
            raise no_effect(idle, "engine.kind tensorrt_llm (see engine.concurrency)")
        return serving

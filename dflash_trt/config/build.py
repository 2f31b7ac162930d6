"""The build config: the one schema a user writes, as YAML."""

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from dflash_trt.config.sections import (
    DRAFTERLESS,
    Count,
    Method,
    OnnxRuntime,
    Section,
    Source,
    TargetSource,
    TensorRT,
    TensorRTLLM,
    methods_of,
)

OF_ROUNDS = {"mode", "slots", "prefill_chunk"}  # how our engines run rounds
RECOMPUTE_TAIL = "recompute_tail"  # value of serving.prefix_cache
# MiB: 3 or more chats of 2,000 tokens with models up to 8B, and less than their weights
PREFIX_CACHE = 1024
CHAIN = 3  # drafts of a model that makes them one at a time, as in upstream's examples
Engine = Annotated[OnnxRuntime | TensorRT | TensorRTLLM, Field(discriminator="kind")]


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
        description="limits the draft tokens of a round; unset: block size - 1, the most possible "
        "(tensorrt_llm: 3 of eagle3 and ngram)",
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

    mode: Literal["ensemble", "in_process"] = Field(
        default="ensemble",
        description="ensemble: run verify and draft as Triton models; in_process: run both engines "
        "inside the public model, faster for a small target",
    )
    slots: Count = Field(default=4, description="sets how many sequences are decoded together")
    max_seq_len: Count | None = Field(
        default=None,
        description="limits the tokens of one sequence, prompt included; unset: the smaller "
        "max_position_embeddings of target and drafter, at most 4096",
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
        """MiB of the prefix cache of our own engines."""
        return self.prefix_cache if isinstance(self.prefix_cache, int) else PREFIX_CACHE


class BuildConfig(Section):
    """A deployment of one target, usually with its DFlash drafter."""

    name: str = Field(
        pattern=r"^[a-z0-9][a-z0-9._-]*$",
        description="names the build and its default output folder",
    )
    target: TargetSource = Field(description="selects the model whose output distribution is kept")
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
    engine: Engine = OnnxRuntime()
    speculation: Speculation = Field(default=Speculation(), validate_default=True)
    serving: Serving = Serving()

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
    def _has_its_drafter(cls, speculation: Speculation, info: ValidationInfo) -> Speculation:
        known = {"drafter", "drafters"} <= info.data.keys()  # else one is invalid itself
        method = speculation.method
        if not known or method in (*DRAFTERLESS, *info.data["drafters"]):
            return speculation
        if info.data["drafter"] is None:
            raise PydanticCustomError("no_drafter", "drafter is missing")
        return speculation

    @field_validator("speculation")
    @classmethod
    def _what_the_engine_has(cls, speculation: Speculation, info: ValidationInfo) -> Speculation:
        engine = info.data.get("engine")
        if engine is not None and speculation.method not in methods_of(engine):
            message = "of engine.kind {kind} the methods are {methods}"
            known = {"kind": engine.kind, "methods": ", ".join(methods_of(engine))}
            raise PydanticCustomError("method", message, known)
        if not isinstance(engine, TensorRTLLM):
            return speculation
        if "lookup" in speculation.model_fields_set and speculation.lookup:
            raise no_effect(["lookup"], "engine.kind tensorrt_llm")
        return speculation.model_copy(update={"lookup": False})

    @field_validator("serving")
    @classmethod
    def _goes_with_the_engine(cls, serving: Serving, info: ValidationInfo) -> Serving:
        if "engine" not in info.data:  # it is invalid itself
            return serving
        by_llm = isinstance(info.data["engine"], TensorRTLLM)
        if serving.prefix_cache == RECOMPUTE_TAIL and not by_llm:
            raise PydanticCustomError(
                "prefix_cache", "prefix_cache recompute_tail needs engine.kind tensorrt_llm"
            )
        if by_llm and isinstance(serving.prefix_cache, int):
            raise no_effect(["prefix_cache in MiB"], "engine.kind tensorrt_llm")
        if by_llm and (idle := sorted(OF_ROUNDS & serving.model_fields_set)):
            raise no_effect(idle, "engine.kind tensorrt_llm (see engine.concurrency)")
        return serving

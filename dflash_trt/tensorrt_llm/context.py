"""Input of choices and checks: the pair, the machine and the goal."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dflash_trt.checkpoints import (
    INDEX,
    MODELOPT_FILE,
    SLIDING,
    Drafter,
    Model,
    Pair,
    Target,
    read_json,
)
from dflash_trt.checkpoints.findings import NotKnown
from dflash_trt.config import RECOMPUTE_TAIL, BuildConfig, Method, TensorRTLLM
from dflash_trt.errors import CheckpointError, ConfigError
from dflash_trt.planning import (
    Gpu,
    Layout,
    Machine,
    ModelSize,
    Values,
    drafter_size,
    section,
    target_size,
)

PAGED = (100, 103)  # compute capabilities with paged attention for the drafter
CONTEXT = 4096  # tokens of a sequence, prompt included, for `plan`
TAIL = 2048  # tokens; the usual window of z-lab's drafters


@dataclass(frozen=True)
class Context:
    """One deployment; hardware: overrides the config's."""

    config: BuildConfig
    pair: Pair
    hardware: Machine | None = None

    @property
    def engine(self) -> TensorRTLLM:
        return self.config.llm

    @property
    def machine(self) -> Machine:
        return self.hardware or self.engine.machine

    @property
    def gpu(self) -> Gpu:
        return self.machine.gpu

    @property
    def gpus(self) -> int:
        """GPUs of one instance; ConfigError if the machine has fewer."""
        asked = self.engine.gpus
        if asked is not None and asked > self.machine.all_gpus:
            raise ConfigError(
                f"engine.gpus is {asked}, but {self.machine.name} has {self.machine.all_gpus}",
                f"Set it to at most {self.machine.all_gpus}, or leave it out",
            )
        return asked or self.machine.all_gpus

    @property
    def method(self) -> Method:
        return self.config.speculation.method

    @property
    def in_blocks(self) -> bool:
        """Whether a DFlash drafter fills blocks, with a context beside the target's."""
        return self.method == "dflash"

    @property
    def target(self) -> Target:
        return self.pair.target

    @property
    def drafter(self) -> Drafter:
        return self.pair.drafter

    @cached_property
    def is_gpt_oss(self) -> bool:
        return self.target.architecture.startswith("GptOss")

    @cached_property
    def experts(self) -> int | None:
        """Experts per layer of the target; None: dense."""
        return self.target.known("num_local_experts", "num_experts", "n_routed_experts")

    @cached_property
    def two_sided_windows(self) -> bool:
        """Whether drafter layers have windows before and after a token."""
        if self.drafter.read is not None:
            return any(layer.window and not layer.causal for layer in self.drafter.layers)
        values = self.drafter.values
        kinds = values.get("layer_types")
        windows = isinstance(kinds, list) and SLIDING in kinds
        return windows and False in (values.get("is_causal"), values.get("causal"))

    @property
    def paged(self) -> bool:
        """Whether the drafter can use TRTLLM attention, with its context in the KV cache's pool."""
        return self.gpu.sm in PAGED and not self.two_sided_windows

    @property
    def reuses(self) -> bool:
        """Whether common prefixes share KV cache, with their last tokens recomputed."""
        return self.config.serving.prefix_cache == RECOMPUTE_TAIL

    @property
    def max_draft_len(self) -> int:
        """The number of drafts that the drafter was trained for."""
        return self.drafter.number("block_size") - 1

    @cached_property
    def target_values(self) -> Values:
        return target_values(self.target.directory, self.target.values)

    @cached_property
    def target_size(self) -> ModelSize:
        """The target's size; NotKnown if its config.json does not state it."""
        try:
            return target_size(self.target_values)
        except CheckpointError as error:
            raise NotKnown(str(error)) from None

    @cached_property
    def sizes(self) -> tuple[ModelSize, ModelSize]:
        """The sizes of target and DFlash drafter; NotKnown if a config.json does not state them."""
        try:
            return self.target_size, drafter_size(self.drafter.values, self.target_size)
        except CheckpointError as error:
            raise NotKnown(str(error)) from None


def recompute_tail(drafter: ModelSize) -> int:
    """Return how many tokens of a reused prompt run again, for the drafter to see.

    If all its layers have windows, it cannot see more in any case.
    """
    windows = [layer.window for layer in drafter.layers]
    return max(window or TAIL for window in windows) if all(windows) else TAIL


def target_values(directory: Path, values: Values) -> Values:
    """Return config.json with the quantization that ModelOpt writes beside it."""
    if not (file := directory / MODELOPT_FILE).is_file():
        return values
    more = section(read_json(file), "quantization")
    return {**values, "quantization_config": more | section(values, "quantization_config")}


def kv_bytes(values: Values, dtype: object) -> float:
    """Return bytes per number in the target's KV cache; dtype: of kv_cache_config."""
    if dtype == "auto":
        dtype = section(values, "quantization_config").get("kv_cache_quant_algo")
    return {"fp8": 1.0, "nvfp4": 0.5 + 1 / 16}.get(str(dtype).lower(), 2.0)


def layout_of(args: Values) -> Layout:
    """Return the parallel layout of the arguments of `LLM(...)`."""
    return Layout(
        args["tensor_parallel_size"],
        attention_dp=bool(args["enable_attention_dp"]),
        experts_parallel=(args["moe_expert_parallel_size"] or 1) > 1,
    )


def divide(context: Context, ranks: int) -> bool:
    """Return whether ranks divide the heads of both models; KV heads may be repeated instead.

    Raises NotKnown if a config.json does not say enough. If layers differ, the first counts.
    """
    for model in (context.target, context.drafter):
        if model.absent:
            continue
        query = model.number("num_attention_heads")
        kv = model.known("num_key_value_heads") or query
        if model.read is not None:
            kv = model.layers[0].num_key_value_heads
        if min(query, kv) < 1:
            raise NotKnown(f"the {model.role} has {query} heads on {kv} KV heads")
        if query % ranks or (kv % ranks and ranks % kv):
            return False
    linear = context.target.known("linear_num_key_heads")  # of hybrids
    return not linear or linear % ranks == 0


def weight_bytes(model: Model[Any]) -> int:
    """Return the bytes of the weights, by their index (they may be on the Hub) or files.

    Raises NotKnown without either.
    """
    index = model.directory / INDEX
    about = read_json(index).get("metadata") if index.is_file() else None
    total = about.get("total_size") if isinstance(about, dict) else None
    if isinstance(total, int) and total > 0:
        return total
    files = model.stored.files if model.stored else model.directory.glob("model*.safetensors")
    found = sum(file.stat().st_size for file in files if file.suffix == ".safetensors")
    if not found:
        raise NotKnown(f"the {model.role} has no weights here")
    return found

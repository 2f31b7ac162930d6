"""What the rules and the checks look at: the pair, the machine and the goal."""

from dataclasses import dataclass
from functools import cached_property

from dflash_trt.checkpoints import INDEX, SLIDING, Drafter, ModelSummary, Pair, Target, read_json
from dflash_trt.checkpoints.checks import NotKnown
from dflash_trt.config import BuildConfig, TensorRTLLM
from dflash_trt.errors import ConfigError
from dflash_trt.roofline import Gpu, Machine

Model = ModelSummary[Target] | ModelSummary[Drafter]


@dataclass(frozen=True)
class Heads:
    """Of attention."""

    query: int
    kv: int
    dim: int


@dataclass(frozen=True)
class Case:
    config: BuildConfig
    pair: Pair
    machine: Machine

    @cached_property
    def engine(self) -> TensorRTLLM:
        if not isinstance(self.config.engine, TensorRTLLM):
            raise ConfigError(
                f"engine.kind is {self.config.engine.kind}", "Use engine: {kind: tensorrt_llm}"
            )
        return self.config.engine

    @property
    def gpu(self) -> Gpu:
        return self.machine.gpu

    @property
    def gpus(self) -> int:
        """Of one instance; ConfigError when the machine has fewer."""
        asked = self.engine.gpus
        if asked is not None and asked > self.machine.all_gpus:
            raise ConfigError(
                f"engine.gpus is {asked}, but {self.machine.name} has {self.machine.all_gpus}",
                f"Set it to at most {self.machine.all_gpus}, or leave it out",
            )
        return asked or self.machine.all_gpus

    @property
    def target(self) -> ModelSummary[Target]:
        return self.pair.target

    @property
    def drafter(self) -> ModelSummary[Drafter]:
        return self.pair.drafter

    @cached_property
    def architecture(self) -> str:
        """The target's."""
        return self.target.architecture

    @cached_property
    def is_gpt_oss(self) -> bool:
        return self.architecture.startswith("GptOss")

    @cached_property
    def experts(self) -> int | None:
        """Of the target's layers; None: it is dense."""
        return known(self.target, "num_local_experts", "num_experts", "n_routed_experts")

    @cached_property
    def windows(self) -> bool:
        """Layers of the drafter see only what is near."""
        if self.drafter.model is not None:
            return any(layer.window for layer in self.drafter.layers)
        kinds = self.drafter.values.get("layer_types")
        return isinstance(kinds, list) and SLIDING in kinds

    @cached_property
    def two_sided_windows(self) -> bool:
        """What is near lies behind them in the block, too."""
        if self.drafter.model is not None:
            return any(layer.window and not layer.causal for layer in self.drafter.layers)
        values = self.drafter.values
        return self.windows and False in (values.get("is_causal"), values.get("causal"))

    @property
    def block_size(self) -> int:
        return self.drafter.number("block_size")


def heads(model: Model) -> Heads:
    """NotKnown where config.json does not say enough. Of layers that differ: the first's."""
    query = model.number("num_attention_heads")
    if model.model is not None:
        first = model.model.spec.layers[0]
        return Heads(query, first.num_key_value_heads, first.head_dim)
    kv = known(model, "num_key_value_heads") or query
    dim = known(model, "head_dim") or model.number("hidden_size") // max(query, 1)
    if min(query, kv, dim) < 1:
        raise NotKnown(f"the {model.role} has {query} heads on {kv} KV heads of {dim}")
    return Heads(query, kv, dim)


def known(model: Model, *names: str) -> int | None:
    """The first of the fields that is there."""
    for name in names:
        try:
            return model.number(name)
        except NotKnown:
            continue
    return None


def weight_bytes(model: Model) -> int:
    """Of the weights, by their index, for they may still be on the Hub, else by the files.

    NotKnown where there are neither.
    """
    index = model.directory / INDEX
    about = read_json(index).get("metadata") if index.is_file() else None
    total = about.get("total_size") if isinstance(about, dict) else None
    if isinstance(total, int) and total > 0:
        return total
    files = model.weights.files if model.weights else model.directory.glob("model*.safetensors")
    found = sum(file.stat().st_size for file in files if file.suffix == ".safetensors")
    if not found:
        raise NotKnown(f"the {model.role} has no weights here")
    return found

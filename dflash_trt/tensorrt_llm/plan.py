"""Plan: what a config's pair needs of a machine of NVIDIA GPUs, and its speed there."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dflash_trt.checkpoints import (
    Drafter,
    Pair,
    Report,
    Target,
    locate_config,
    open_drafter,
    open_target,
    packaged_config,
)
from dflash_trt.config import BuildConfig, GraphEngine, Source, TensorRTLLM
from dflash_trt.engine_kinds import graph_facts
from dflash_trt.engines import (
    buffered_bytes,
    drafter_cache_len,
    logits_bytes,
    target_cache_len,
)
from dflash_trt.errors import CheckpointError, ConfigError
from dflash_trt.hardware import PRESETS, Machine
from dflash_trt.planning import (
    PLAIN,
    Deployment,
    Layout,
    ModelSize,
    OneGpu,
    as_stored,
    dflash,
    drafter_size,
    expected_acceptance,
    feature_size,
    fit_errors,
    state_bytes,
    target_size,
    token_bytes,
)
from dflash_trt.tensorrt_llm.llm_args import (
    CONTEXT,
    Context,
    choose_args,
    deployment,
    drafter_backend,
    kv_bytes,
    layout_of,
    target_values,
)
from dflash_trt.tensorrt_llm.quantization import as_if_quantized
from dflash_trt.tensorrt_llm.schema import LlmArgs

CONTEXTS = tuple(1024 * n for n in (1, 4, 16, 32, 64, 128))
BLOCK = 16  # z-lab's default


class Planned(NamedTuple):
    """What is deployed, and what a build would write, if there is one for the machine."""

    machine: Machine
    deployment: Deployment
    built: Mapping[str, Any] | None
    max_seq_len: int | None


class Acceptance(NamedTuple):
    tau: float  # tokens that a round commits
    source: str


def locate_planned(source: Source, role: str, report: Report, scratch: Path) -> Path:
    """Return a directory with at least the model's config.json.

    Of a published model that cannot be downloaded, the package's (`models.yaml`) in `scratch`.
    """
    try:
        return locate_config(source, role, report, scratch).directory
    except CheckpointError as error:
        return packaged_config(source, role, scratch, error).directory


def dflash_drafter(config: BuildConfig) -> Source:
    """Return the DFlash drafter to plan for, whatever the method; ConfigError without one."""
    other = config.drafter if config.speculation.method == "dflash" else None
    source = config.drafters.get("dflash", other)
    if source is None:
        raise ConfigError(
            "a plan is of a DFlash drafter, and the config names none",
            "Name it: drafters: {dflash: {hub: ORG/NAME, revision: COMMIT}}",
        )
    return source


def make_plan(
    config: BuildConfig,
    target: Path,
    drafter: Path,
    hardware: Machine | None = None,
    context: int | None = None,
    acceptance: float | None = None,
) -> dict[str, Any]:
    """Return the plan for JSON; seconds, bytes and tokens/s.

    target, drafter: directories with at least a config.json. hardware: overrides the config's.
    """
    target_hub = config.target.hub or ""
    drafter_hub = dflash_drafter(config).hub or ""
    drafting = open_drafter(drafter)
    block = _block_size(config, drafting.values)
    planned = _deploy(config, open_target(target), drafting, hardware, block)
    machine = planned.machine
    deployed = planned.deployment
    assumed = _acceptance(drafter_hub, block, acceptance)
    longest = planned.max_seq_len or CONTEXT
    context = context or min(CONTEXT, longest)
    if context > longest and isinstance(deployed, OneGpu):
        raise ConfigError(
            f"--context {context} is above serving.max_seq_len, {longest}, the room of a slot",
            "Set serving.max_seq_len",
        )
    longest = max(context, longest)
    methods = (PLAIN, dflash(deployed.drafter, assumed.tau, block - 1))
    return {
        "name": config.name,
        "machine": {"name": machine.name, "gpu": machine.gpu.name, "gpus": deployed.gpus},
        "target": _about_model(deployed.target, target_hub or target.name),
        "drafter": _about_model(deployed.drafter, drafter_hub or drafter.name),
        "assumed": {
            "context": context,
            "block": block,
            "acceptance": assumed.tau,
            "acceptance_from": assumed.source,
            "kv_bytes": deployed.kv_bytes,
            "attention_backend": deployed.backend,
        },
        "built": planned.built,
        "memory": [*deployed.memory(CONTEXTS, longest)],
        "speed": [
            point for method in methods for point in deployed.speed(method, context, longest)
        ],
        # of engine kind pytorch only steps were measured
        "errors": None if isinstance(deployed, OneGpu) else fit_errors(),
    }


def _deploy(
    config: BuildConfig, target: Target, drafter: Drafter, hardware: Machine | None, block: int
) -> Planned:
    if isinstance(config.engine, TensorRTLLM):
        return _as_built(config, config.engine, target, drafter, hardware, block)
    if hardware is None:
        raise ConfigError(
            f"a plan is for NVIDIA machines, and engine kind {config.engine.kind} names none",
            f"Give --machine: one of {', '.join(PRESETS)}",
        )
    if graph_facts(config.engine.kind).is_planned:
        return _on_one_gpu(config, config.engine, target, drafter, hardware, block)
    planned = Context(config, Pair(target, drafter), hardware)
    values = target_values(target.directory, target.values)
    size = target_size(values)
    deployed = Deployment(
        machine=hardware,
        gpus=hardware.all_gpus,
        target=size,
        drafter=drafter_size(drafter.values, size),
        block=block,
        kv_bytes=kv_bytes(values, "auto"),
        backend=drafter_backend(planned),
    )
    return Planned(hardware, deployed, None, config.serving.max_seq_len)


def _on_one_gpu(
    config: BuildConfig,
    engine: GraphEngine,
    target: Target,
    drafter: Drafter,
    hardware: Machine,
    block: int,
) -> Planned:
    """Plan the slots that `build` would make on one GPU of the machine."""
    options = engine.options
    if options.dtype == "float32":
        raise ConfigError(
            "a plan is for numbers of 16 bits, and engine.dtype is float32",
            "Plan with engine.dtype: bfloat16",
        )
    size = target_size(target_values(target.directory, target.values))
    drafter_model = drafter_size(drafter.values, size)
    fp8 = options.storage.fp8
    serving = config.serving
    longest = serving.max_seq_len or CONTEXT
    deployed = OneGpu(
        machine=hardware,
        gpus=1,
        target=as_stored(size, fp8=fp8),
        drafter=as_stored(drafter_model, fp8=fp8),
        block=block,
        backend=config.engine.kind,
        max_seq_len=longest,
        slot_bytes=_slot_bytes(size, drafter_model, longest, block)
        + buffered_bytes(feature_size(drafter.values, size)),
        prefix_cache=serving.prefix_cache_mib << 20,
    )
    built = {
        "slots": serving.slots,
        "max_seq_len": longest,
        "slot_bytes": deployed.slot_bytes,
        "fits": serving.slots <= deployed.fit(Layout(), longest, longest),
    }
    return Planned(hardware, deployed, built, longest)


def _slot_bytes(target: ModelSize, drafter: ModelSize, longest: int, block: int) -> int:
    """Return what caches, states and logits of a slot take in both engines."""
    cached = target_cache_len(longest, block) * token_bytes(target)
    cached += drafter_cache_len(longest, block) * token_bytes(drafter)
    # tokens are chosen from a copy of the target's
    cached += 2 * logits_bytes(target.vocab, block) + logits_bytes(drafter.vocab, block)
    states = state_bytes(target)
    return cached if states is None else cached + states["slot"]


def _as_built(
    config: BuildConfig,
    engine: TensorRTLLM,
    target: Target,
    drafter: Drafter,
    hardware: Machine | None,
    block: int,
) -> Planned:
    """Plan with the arguments that `build` would write."""
    machine = hardware or engine.machine
    pair = Pair(as_if_quantized(engine.quantize, target), drafter)
    planned = Context(config, pair, machine)
    args = choose_args(planned)
    backend = args.value("speculative_config.attention_backend") or drafter_backend(planned)
    deployed = deployment(planned, args, backend, block)
    return Planned(machine, deployed, _about_args(args), args.max_seq_len)


def _acceptance(drafter_hub: str, block: int, given: float | None) -> Acceptance:
    if given is None:
        return Acceptance(*expected_acceptance(drafter_hub, block - 1))
    if given > block:
        raise ConfigError(
            f"--acceptance {given:g} is above {block}, the tokens of a round",
            "Give the mean number of tokens that a round commits",
        )
    return Acceptance(given, "given")


def _block_size(config: BuildConfig, values: Mapping[str, Any]) -> int:
    stated = values.get("block_size")
    trained = stated if type(stated) is int and 2 <= stated <= 1024 else BLOCK
    return min(trained, (config.speculation.draft_tokens or trained) + 1)


def _about_model(size: ModelSize, name: str) -> dict[str, Any]:
    formats = {
        kind.name for layer in size.kinds for count, kind in layer.parameters_by_format() if count
    }
    return {
        "name": name,
        "parameters": size.parameters,
        "weight_bytes": round(size.weight_bytes),
        "formats": sorted(formats),
        "layers": len(size.layers),
        "experts": max((layer.experts for layer in size.layers), default=0),
    }


def _about_args(args: LlmArgs) -> dict[str, Any]:
    return {
        "layout": str(layout_of(args.complete)),
        "max_batch_size": args.max_batch_size,
        "max_seq_len": args.max_seq_len,
        "draft_len_schedule": args.value("speculative_config.draft_len_schedule"),
    }

"""`dflash-trt plan`: what a config's pair needs of a machine and what it gives there."""

from pathlib import Path
from typing import Any

from dflash_trt.checkpoints import Pair, config_values, summarize_drafter, summarize_target
from dflash_trt.config import BLOCKS, BuildConfig, Source, TensorRTLLM
from dflash_trt.errors import ConfigError
from dflash_trt.planning.chat import chat
from dflash_trt.planning.curves import Deployment, Point, curve, front
from dflash_trt.roofline import (
    EAGLE_CHAIN,
    PLAIN,
    PRESETS,
    Constants,
    Machine,
    ModelSize,
    Values,
    dflash,
    drafter_size,
    eagle,
    expected_acceptance,
    expected_eagle,
    fit_errors,
    machine,
    target_size,
)
from dflash_trt.tensorrt_llm import (
    CONTEXT,
    PAGED,
    announced,
    choose_args,
    kv_bytes,
    layout_of,
    target_values,
)

CONTEXTS = tuple(1024 * n for n in (1, 4, 16, 32, 64, 128))
BLOCK = 16  # z-lab's default


def plan(
    config: BuildConfig,
    target: Path,
    drafter: Path,
    *,
    hardware: Machine | None = None,
    context: int | None = None,
    acceptance: float | None = None,
    eagle_acceptance: float | None = None,
) -> dict[str, Any]:
    """The plan, ready for JSON; seconds, bytes and tokens/s.

    target, drafter: directories with at least a config.json. hardware: in place of the config's.
    Raises ConfigError when no machine is named or an acceptance length cannot be.
    """
    engine = config.engine
    if hardware is None and not isinstance(engine, TensorRTLLM):
        raise ConfigError(
            f"a plan is for NVIDIA machines, and engine kind {engine.kind} names none",
            f"Give --machine: one of {', '.join(PRESETS)}",
        )
    args, gpus, summary = None, None, summarize_target(target)
    if isinstance(engine, TensorRTLLM):
        summary = announced(engine.quantize, summary)
        hardware, gpus = hardware or machine(engine.hardware), engine.gpus
        if gpus is not None and gpus > hardware.all_gpus:
            raise ConfigError(
                f"engine.gpus is {gpus}, but {hardware.name} has {hardware.all_gpus}",
                f"Set it to at most {hardware.all_gpus}, or leave it out",
            )
        # the arguments that `build` would write
        args = choose_args(config, Pair(summary, summarize_drafter(drafter)), hardware)
    assert hardware is not None
    values = target_values(target, summary.values)
    draft_values = config_values(drafter, "drafter")
    size = target_size(values)
    block = _block(config, draft_values)
    backend = "TRTLLM" if hardware.gpu.sm in PAGED else "VANILLA"
    if args is not None:
        backend = args.value("speculative_config.attention_backend") or backend
    deployment = Deployment(
        machine=hardware,
        gpus=gpus or hardware.all_gpus,
        target=size,
        drafter=drafter_size(draft_values, size),
        block=block,
        kv_bytes=kv_bytes(values, args.kv_cache_config.dtype if args else "auto"),
        paged=backend == "TRTLLM",
    )
    tau, source = acceptance, "given"
    if tau is None:
        tau, source = expected_acceptance(dflash_drafter(config).hub or "", block - 1)
    elif not 1 <= tau <= block:
        raise ConfigError(
            f"--acceptance {tau:g} is not from 1 to {block}, the tokens of a round",
            "Give the mean number of tokens that a round commits",
        )
    limit = config.serving.max_seq_len
    context = context or min(CONTEXT, limit or CONTEXT)
    chain, chain_source = expected_eagle(config.target.hub or "")
    if eagle_acceptance is not None:
        chain, chain_source = eagle_acceptance, "given"
    if chain > EAGLE_CHAIN + 1:
        raise ConfigError(
            f"--eagle-acceptance {chain:g} is more than {EAGLE_CHAIN + 1}, the tokens of a round",
            "Give the mean number of tokens that a round commits",
        )
    constants = Constants.fitted()
    methods = (PLAIN, eagle(size, chain), dflash(deployment.drafter, tau, block - 1))
    curves = [curve(deployment, method, context, constants) for method in methods]
    return {
        "name": config.name,
        "machine": {
            "name": hardware.name,
            "gpu": hardware.gpu.name,
            "gpus": deployment.gpus,
        },
        "target": _model(size, config.target.hub or target.name),
        "drafter": _model(deployment.drafter, dflash_drafter(config).hub or drafter.name),
        "assumed": {
            "context": context,
            "block": block,
            "acceptance": tau,
            "acceptance_from": source,
            "eagle_acceptance": chain,
            "eagle_acceptance_from": chain_source,
            "kv_bytes": deployment.kv_bytes,
            "attention_backend": backend,
        },
        "built": args  # what `build` takes of the layouts
        and {
            "layout": str(layout_of(args.model_dump())),
            "max_batch_size": args.max_batch_size,
            "max_seq_len": args.max_seq_len,
            "draft_len_schedule": args.value("speculative_config.draft_len_schedule"),
        },
        "chat": args and chat(deployment, args),
        "memory": _memory(deployment),
        "speed": [_point(point, point in front(points)) for points in curves for point in points],
        "errors": fit_errors(),
    }


def dflash_drafter(config: BuildConfig) -> Source:
    """Whose rounds are planned, whatever method the config builds. ConfigError if it names none."""
    other = config.drafter if config.speculation.method in BLOCKS else None
    if found := config.drafters.get("dflash", other):
        return found
    raise ConfigError(
        "a plan is of a DFlash drafter beside other methods, and the config names none",
        "Name it: drafters: {dflash: {hub: ORG/NAME, revision: COMMIT}}",
    )


def _block(config: BuildConfig, values: Values) -> int:
    found = values.get("block_size")
    trained = found if type(found) is int and 2 <= found <= 1024 else BLOCK
    return min(trained, (config.speculation.draft_tokens or trained) + 1)


def _model(size: ModelSize, name: str) -> dict[str, Any]:
    formats = {kind.name for layer in size.kinds for count, kind in layer.parts() if count}
    return {
        "name": name,
        "parameters": size.parameters,
        "weight_bytes": round(size.weight_bytes),
        "formats": sorted(formats),
        "layers": len(size.layers),
        "experts": max((layer.experts for layer in size.layers), default=0),
        "estimated": list(size.estimated),
    }


def _memory(deployment: Deployment) -> list[dict[str, Any]]:
    rows = []
    for layout in deployment.layouts():
        if layout.experts_parallel and not layout.attention_dp:
            continue  # the same bytes as without: whole experts weigh what their slices do
        instances = deployment.gpus // layout.gpus
        fits = {context: deployment.fit(layout, context) for context in CONTEXTS}
        one = fits[CONTEXTS[0]]
        rows.append(
            {
                "layout": str(layout),
                "gpus": layout.gpus,
                "instances": instances,
                "target_bytes": round(one.target),
                "drafter_bytes": round(one.drafter),
                "free_bytes": round(one.free),
                "kv_bytes_per_token": round(one.per_token),
                "by_context": {
                    context: {
                        "sequences": instances * found.sequences,
                        "kv_bytes": round(found.sequence),
                        "drafter_context_bytes": round(found.drafting),
                        "free_gpu_memory_fraction": round(found.fraction, 3),
                    }
                    for context, found in fits.items()
                },
            }
        )
    return rows


def _point(point: Point, on_front: bool) -> dict[str, Any]:
    return {
        "method": point.method.name,
        "concurrency": point.concurrency,
        "layout": str(point.layout),
        "draft_tokens": point.method.draft_tokens,
        "acceptance": round(point.method.acceptance, 3),
        "tokens_per_user": round(point.per_user, 1),
        "tokens_per_gpu": round(point.per_gpu, 1),
        "round": vars(point.step),
        "on_front": on_front,
    }

"""`dflash-trt plan`: what a config's pair needs of a machine and what it gives there."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from dflash_trt.checkpoints import Pair, config_values, summarize_drafter, summarize_target
from dflash_trt.config import BuildConfig, TensorRTLLM
from dflash_trt.errors import ConfigError
from dflash_trt.planning.plan import Deployment, Point, curve, front, layouts
from dflash_trt.roofline.hardware import PRESETS, Machine, machine
from dflash_trt.roofline.methods import (
    EAGLE_ACCEPTANCE,
    EAGLE_CHAIN,
    PLAIN,
    dflash,
    eagle,
    expected,
)
from dflash_trt.roofline.passes import Constants, fit_errors
from dflash_trt.roofline.shape import Shape, Values, drafter_shape, target_shape
from dflash_trt.tensorrt_llm.args import choose_args
from dflash_trt.tensorrt_llm.choices import PAGED
from dflash_trt.tensorrt_llm.chosen import LlmArgs
from dflash_trt.tensorrt_llm.pace import CONTEXT, kv_bytes, layout_of, target_values

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
    host = hardware or _machine(config)
    gpus = _gpus(config, host)
    args = _chosen(config, target, drafter, host)
    values = target_values(target, config_values(target, "target"))
    draft_values = config_values(drafter, "drafter")
    shape = target_shape(values)
    block = _block(config, draft_values)
    deployment = Deployment(
        machine=host,
        gpus=gpus,
        target=shape,
        drafter=drafter_shape(draft_values, shape),
        block=block,
        kv_bytes=kv_bytes(values, args.kv_cache_config.dtype if args else "auto"),
        paged=_backend(host, args) == "TRTLLM",
    )
    tau, source = _acceptance(config, acceptance, block - 1)
    limit = config.serving.max_seq_len
    context = context or min(CONTEXT, limit or CONTEXT)
    chain = eagle_acceptance or EAGLE_ACCEPTANCE
    if chain > EAGLE_CHAIN + 1:
        raise ConfigError(
            f"--eagle-acceptance {chain:g} is more than {EAGLE_CHAIN + 1}, the tokens of a round",
            "Give the mean number of tokens that a round commits",
        )
    constants = Constants.fitted()
    methods = (
        PLAIN,
        eagle(shape, chain),
        dflash(deployment.drafter, tau, block - 1),
    )
    curves = {method.name: curve(deployment, method, context, constants) for method in methods}
    return {
        "name": config.name,
        "machine": {"name": host.name, "gpu": host.gpu.name, "gpus": gpus},
        "target": _model(shape, _name(config.target.hub, target)),
        "drafter": _model(deployment.drafter, _name(config.drafter.hub, drafter)),
        "assumed": {
            "context": context,
            "block": block,
            "acceptance": tau,
            "acceptance_from": source,
            "eagle_acceptance": chain,
            "kv_bytes": deployment.kv_bytes,
            "attention_backend": _backend(host, args),
        },
        "built": _built(args),
        "memory": _memory(deployment),
        "speed": [_point(point, points) for points in curves.values() for point in points],
        "errors": fit_errors(),
    }


def _machine(config: BuildConfig) -> Machine:
    if isinstance(config.engine, TensorRTLLM):
        return machine(config.engine.hardware)
    raise ConfigError(
        f"a plan is for NVIDIA machines, and engine kind {config.engine.kind} names none",
        f"Give --machine: one of {', '.join(PRESETS)}",
    )


def _gpus(config: BuildConfig, host: Machine) -> int:
    asked = config.engine.gpus if isinstance(config.engine, TensorRTLLM) else None
    if asked is not None and asked > host.all_gpus:
        raise ConfigError(
            f"engine.gpus is {asked}, but {host.name} has {host.all_gpus}",
            f"Set it to at most {host.all_gpus}, or leave it out",
        )
    return asked or host.all_gpus


def _block(config: BuildConfig, values: Values) -> int:
    found = values.get("block_size")
    trained = found if type(found) is int and 2 <= found <= 1024 else BLOCK
    return min(trained, (config.speculation.draft_tokens or trained) + 1)


def _chosen(config: BuildConfig, target: Path, drafter: Path, host: Machine) -> LlmArgs | None:
    """The arguments that `build` would write; None for another engine kind."""
    if not isinstance(config.engine, TensorRTLLM):
        return None
    return choose_args(config, Pair(summarize_target(target), summarize_drafter(drafter)), host)


def _backend(host: Machine, args: LlmArgs | None) -> str:
    if args is not None:
        return args.speculative_config.attention_backend
    return "TRTLLM" if host.gpu.sm in PAGED else "VANILLA"


def _built(args: LlmArgs | None) -> dict[str, Any] | None:
    """What `build` takes of the layouts."""
    if args is None:
        return None
    return {
        "layout": str(layout_of(args.model_dump())),
        "max_batch_size": args.max_batch_size,
        "max_seq_len": args.max_seq_len,
        "draft_len_schedule": args.speculative_config.draft_len_schedule,
    }


def _acceptance(config: BuildConfig, given: float | None, drafts: int) -> tuple[float, str]:
    """The tokens of a round with `drafts` drafts, and where that is from."""
    most = drafts + 1
    if given is not None:
        if not 1 <= given <= most:
            raise ConfigError(
                f"--acceptance {given:g} is not from 1 to {most}, the tokens of a round",
                "Give the mean number of tokens that a round commits",
            )
        return given, "given"
    return expected(config.drafter.hub or "", drafts)


def _name(hub: str | None, directory: Path) -> str:
    return hub or directory.name


def _model(shape: Shape, name: str) -> dict[str, Any]:
    formats = {kind.name for layer in shape.kinds for count, kind in layer.parts() if count}
    return {
        "name": name,
        "parameters": shape.parameters,
        "weight_bytes": round(shape.weight_bytes),
        "formats": sorted(formats),
        "layers": len(shape.layers),
        "experts": max((layer.experts for layer in shape.layers), default=0),
        "estimated": list(shape.estimated),
    }


def _memory(deployment: Deployment) -> list[dict[str, Any]]:
    rows = []
    for layout in layouts(deployment):
        if layout.experts_parallel and not layout.attention_dp:
            continue  # as without: whole experts weigh what their slices do
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


def _point(point: Point, points: list[Point]) -> dict[str, Any]:
    return {
        "method": point.method,
        "concurrency": point.concurrency,
        "layout": str(point.layout),
        "draft_tokens": point.draft_tokens,
        "acceptance": round(point.acceptance, 3),
        "tokens_per_user": round(point.per_user, 1),
        "tokens_per_gpu": round(point.per_gpu, 1),
        "round": asdict(point.step),
        "on_front": point in front(points),
    }

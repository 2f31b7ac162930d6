"""`dflash-trt plan`: what a config's pair needs of a machine, and its speed there."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.table import Column, Table

from dflash_trt import planning, tensorrt_llm
from dflash_trt.checkpoints import (
    Pair,
    Report,
    locate_config,
    open_drafter,
    open_target,
    packaged_config,
)
from dflash_trt.cli.show import on_one_line, text_console
from dflash_trt.config import BuildConfig, Source, TensorRTLLM
from dflash_trt.errors import CheckpointError, ConfigError
from dflash_trt.planning import Machine

CONTEXTS = tuple(1024 * n for n in (1, 4, 16, 32, 64, 128))
BLOCK = 16  # z-lab's default
MIB, GIB, WIDTH = 1 << 20, 1 << 30, 140


def locate_planned(source: Source, role: str, report: Report, scratch: Path) -> Path:
    """Return a directory with at least the model's config.json.

    Of a published model that cannot be downloaded, the package's (`models.yaml`) in `scratch`.
    """
    try:
        return locate_config(source, role, report, scratch).directory
    except CheckpointError as error:
        return packaged_config(source, role, scratch, error).directory


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
    engine, summary, drafting = config.engine, open_target(target), open_drafter(drafter)
    block = _block_size(config, drafting.values)
    args = None
    if isinstance(engine, TensorRTLLM):
        summary = tensorrt_llm.as_if_quantized(engine.quantize, summary)
        hardware = hardware or engine.machine
        # the arguments that `build` would write
        planned = tensorrt_llm.Context(config, Pair(summary, drafting), hardware)
        args = tensorrt_llm.choose_args(planned)
        backend = args.value("speculative_config.attention_backend")
        backend = backend or tensorrt_llm.drafter_backend(planned)
        deployment = tensorrt_llm.deployment(planned, args, backend, block)
    elif hardware is None:
        raise ConfigError(
            f"a plan is for NVIDIA machines, and engine kind {engine.kind} names none",
            f"Give --machine: one of {', '.join(planning.PRESETS)}",
        )
    else:
        planned = tensorrt_llm.Context(config, Pair(summary, drafting), hardware)
        values = tensorrt_llm.target_values(target, summary.values)
        size = planning.target_size(values)
        deployment = planning.Deployment(
            machine=hardware,
            gpus=hardware.all_gpus,
            target=size,
            drafter=planning.drafter_size(drafting.values, size),
            block=block,
            kv_bytes=tensorrt_llm.kv_bytes(values, "auto"),
            backend=tensorrt_llm.drafter_backend(planned),
        )
    hubs = config.target.hub or "", dflash_drafter(config).hub or ""
    tau, source = planning.expected_acceptance(hubs[1], block - 1)
    if acceptance is not None:
        tau, source = acceptance, "given"
    if tau > block:
        fix = "Give the mean number of tokens that a round commits"
        raise ConfigError(f"--acceptance {tau:g} is above {block}, the tokens of a round", fix)
    longest = (args.max_seq_len if args else config.serving.max_seq_len) or tensorrt_llm.CONTEXT
    context = context or min(tensorrt_llm.CONTEXT, longest)
    longest = max(context, longest)
    methods = planning.PLAIN, planning.dflash(deployment.drafter, tau, block - 1)
    return {
        "name": config.name,
        "machine": {"name": hardware.name, "gpu": hardware.gpu.name, "gpus": deployment.gpus},
        "target": _about_model(deployment.target, hubs[0] or target.name),
        "drafter": _about_model(deployment.drafter, hubs[1] or drafter.name),
        "assumed": {
            "context": context,
            "block": block,
            "acceptance": tau,
            "acceptance_from": source,
            "kv_bytes": deployment.kv_bytes,
            "attention_backend": deployment.backend,
        },
        "built": args  # the layout that `build` chooses
        and {
            "layout": str(tensorrt_llm.layout_of(args.complete)),
            "max_batch_size": args.max_batch_size,
            "max_seq_len": args.max_seq_len,
            "draft_len_schedule": args.value("speculative_config.draft_len_schedule"),
        },
        "memory": [*deployment.memory(CONTEXTS, longest)],
        "speed": [
            point for method in methods for point in deployment.speed(method, context, longest)
        ],
        "errors": planning.fit_errors(),
    }


def dflash_drafter(config: BuildConfig) -> Source:
    """Return the DFlash drafter to plan for, whatever the method; ConfigError without one."""
    other = config.drafter if config.speculation.method == "dflash" else None
    if found := config.drafters.get("dflash", other):
        return found
    raise ConfigError(
        "a plan is of a DFlash drafter, and the config names none",
        "Name it: drafters: {dflash: {hub: ORG/NAME, revision: COMMIT}}",
    )


def _block_size(config: BuildConfig, values: Mapping[str, Any]) -> int:
    found = values.get("block_size")
    trained = found if type(found) is int and 2 <= found <= 1024 else BLOCK
    return min(trained, (config.speculation.draft_tokens or trained) + 1)


def _about_model(size: planning.ModelSize, name: str) -> dict[str, Any]:
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


def show_plan(plan: Mapping[str, Any]) -> None:
    console = text_console(WIDTH)
    errors = [math.expm1(plan["errors"][name]) for name in ("median", "nine_of_ten")]
    console.print(
        *_heading_lines(plan),
        *("", _memory_table(plan), "", _speed_table(plan), ""),
        f"These are estimates. Of {plan['errors']['checked']} published figures that the model was "
        "not fitted to, half are off by less than {:.0%} and nine of ten by less than {:.0%} "
        "(docs/speculation.md). Prefill is not in them.".format(*errors),
        sep="\n",
        markup=False,
    )
    if not plan["speed"]:
        console.print(
            "The weights do not fit: take more or larger GPUs, or a quantized checkpoint."
        )


def _heading_lines(plan: Mapping[str, Any]) -> Iterator[str]:
    machine = plan["machine"]
    yield f"{plan['name']} on {machine['gpus']} x {machine['gpu']} ({machine['name']})"
    for part in ("target", "drafter", "assumed", "built"):
        for name, value in (plan[part] or {}).items():
            yield f"  {part:<9}{name:<24}{on_one_line(value)}"


def _table(title: str, *columns: str) -> Table:
    headers = [Column(name, justify="right", no_wrap=True) for name in columns]
    return Table(*headers, title=title, title_justify="left", box=None, pad_edge=False)


def _memory_table(plan: Mapping[str, Any]) -> Table:
    contexts = [f"{context // 1024}k" for context in plan["memory"][0]["sequences"]]
    hybrid = any(row["state_bytes"] for row in plan["memory"])
    states = ["state of a sequence, MiB"] if hybrid else []
    table = _table(
        "Memory of a GPU in GiB, and sequences on all of them by length",
        *("layout", "target", "drafter", "left", "KV of a token, KiB", *states, *contexts),
    )
    for row in plan["memory"]:
        name = f"{row['instances']} x {row['layout']}"
        sizes = (row["target_bytes"], row["drafter_bytes"], row["free_bytes"])
        cells = [f"{size / GIB:.1f}" for size in sizes]
        fits = [f"{count:,}" for count in row["sequences"].values()]
        cells.append(f"{row['kv_bytes_per_token'] / 1024:.1f}")
        if hybrid:
            cells.append(f"{row['state_bytes'] / MIB:.1f}")
        table.add_row(name, *cells, *fits)
    return table


def _speed_table(plan: Mapping[str, Any]) -> Table:
    table = _table(
        f"tokens/s, sequences of {plan['assumed']['context']} tokens, best layout of each method",
        *("sequences", "method", "user", "GPU", "over plain", "drafts", "round, ms", "layout"),
    )
    plain = {
        x["concurrency"]: x["tokens_per_user"] for x in plan["speed"] if x["method"] == "plain"
    }
    for point in sorted(plan["speed"], key=lambda point: point["concurrency"]):
        user, beside = point["tokens_per_user"], plain.get(point["concurrency"])
        table.add_row(
            f"{point['concurrency']:,}",
            point["method"],
            f"{user:,.0f}",
            f"{point['tokens_per_gpu']:,.0f}",
            f"{user / beside:.2f}x" if beside else "",
            str(point["draft_tokens"]),
            f"{1000 * sum(point['round'].values()):.2f}",
            point["layout"],
        )
    return table

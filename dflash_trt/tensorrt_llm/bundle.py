"""A bundle: both checkpoints, the arguments of `LLM`, its environment.
```
engines/tensorrt_llm/   engine.json, llm_args.yaml, env.sh, drafter/, target/ (unless on the Hub)
```

Paths in it are relative: the directory can be moved.
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import yaml

from dflash_trt.checkpoints import Model, Report, is_converted, small_files, write_tokenizer
from dflash_trt.config import BuildConfig
from dflash_trt.engines import ENGINE_FILE
from dflash_trt.errors import EngineError
from dflash_trt.files import (
    EXACT,
    MAX_YAML,
    Size,
    compose_yaml,
    copy_file,
    parse_yaml,
    read_as,
    read_text,
)
from dflash_trt.planning import lowest_believed
from dflash_trt.tensorrt_llm.llm_args import BUILT_TOKENIZER, Context, env_vars
from dflash_trt.tensorrt_llm.schema import LlmArgs
from dflash_trt.weights import open_files

KIND = "tensorrt_llm"
ARGS_FILE = "llm_args.yaml"


@dataclass(frozen=True, kw_only=True)
class BundleInfo:
    """A bundle and the machine it was made for; others may run it."""

    __pydantic_config__: ClassVar = EXACT

    kind: str
    version: str  # of TensorRT-LLM
    machine: str
    gpu: str
    sm: int  # compute capability of the GPUs: 90, 100, 103
    memory_bytes: int  # per GPU
    gpus: Size  # per node, for one instance
    nodes: Size
    architecture: str = ""  # of the target
    environment: dict[str, str]
    lowest: float = 0.0  # lowest plausible acceptance length; 0: nothing is published
    lowest_by: str = ""


def checkpoint_files(model: Model[Any], *, weights: bool = True) -> list[Path]:
    """Return JSON files, templates and weights; CheckpointError unless weights are complete."""
    weight_files = open_files(model.directory)[0] if weights else []
    return sorted({*small_files(model.directory), *weight_files})


def write_bundle(directory: Path, context: Context, args: LlmArgs, report: Report) -> None:
    """Write `engines/tensorrt_llm`; a target on the Hub must have its commit."""
    config = context.config
    pair = context.pair
    section = context.engine
    engine = directory / "engines" / KIND
    engine.mkdir(parents=True, exist_ok=True)
    if not pair.drafter.absent:
        _copy_checkpoint(pair.drafter, engine / "drafter", report)
    if section.checkpoints != "hub" and section.quantize is None:  # quantizing writes it there
        _copy_checkpoint(pair.target, engine / "target", report)
        if is_converted(pair.target.directory):
            write_tokenizer(pair.target.directory, engine / "target")

    head = (
        f"# {config.name}: arguments of LLM() of TensorRT-LLM {section.version}.\n"
        "# Paths start at this folder.\n"
    )
    (engine / ARGS_FILE).write_text(head + args.to_yaml(), encoding="utf-8")

    machine = context.machine
    environment = env_vars(context)
    lines = [f"export {name}={shlex.quote(value)}" for name, value in sorted(environment.items())]
    (engine / "env.sh").write_text("\n".join(["# shellcheck shell=sh", *lines]) + "\n")

    ranks = args.tensor_parallel_size
    gpus = min(ranks, machine.gpus)
    lowest, lowest_by = lowest_believed(drafter_name(config), args.drafts, "TensorRT-LLM")
    info = BundleInfo(
        kind=KIND,
        version=section.version,
        machine=machine.name,
        gpu=machine.gpu.name,
        sm=machine.gpu.sm,
        memory_bytes=machine.gpu.memory_bytes,
        gpus=gpus,
        nodes=-(-ranks // gpus),
        architecture=pair.target.architecture,
        environment=environment,
        lowest=lowest,
        lowest_by=lowest_by,
    )
    (engine / ENGINE_FILE).write_text(json.dumps(asdict(info), indent=2) + "\n", encoding="utf-8")


def _copy_checkpoint(model: Model[Any], directory: Path, report: Report) -> None:
    files = checkpoint_files(model)
    directory.mkdir(parents=True)
    step = f"copying the {model.role}"
    for done, file in enumerate(files):
        report(step, done, len(files))
        copy = directory / file.relative_to(model.directory)
        copy.parent.mkdir(exist_ok=True)
        copy_file(file, copy)
    report(step, len(files), len(files))


def drafter_name(config: BuildConfig) -> str:
    """Return the name of the drafter's id or directory, as in published figures, or ""."""
    drafter = config.drafter
    return Path(drafter.hub or str(drafter.path)).name if drafter else ""


def read_info(engine: Path) -> BundleInfo:
    """Read `engine.json`; EngineError if missing or damaged."""
    path = engine / ENGINE_FILE
    try:
        return read_as(path, BundleInfo)
    except (OSError, ValueError) as error:
        raise EngineError(
            f"{path} is not an engine description ({error})", "Run `dflash-trt build` again"
        ) from error


def read_llm_args(engine: Path) -> dict[str, Any]:
    """Return the arguments of `tensorrt_llm.LLM`, with absolute paths into the bundle."""
    path = engine / ARGS_FILE
    try:
        args: dict[str, Any] = parse_yaml(compose_yaml(read_text(path, MAX_YAML)))
        drafter = args.get("speculative_config") or {}
        if "revision" not in args:
            args["model"] = str(engine.resolve() / args["model"])
        if args.get("tokenizer") == BUILT_TOKENIZER:
            args["tokenizer"] = str((engine / BUILT_TOKENIZER).resolve())
        if drafter.get("speculative_model"):
            drafter["speculative_model"] = str(engine.resolve() / drafter["speculative_model"])
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError) as error:
        raise EngineError(
            f"{path} does not hold the arguments of an LLM ({error})",
            "Run `dflash-trt build` again",
        ) from error
    return args


def with_local_target(args: Mapping[str, Any]) -> dict[str, Any]:
    """Download a target on the Hub: by id TensorRT-LLM fetches gpt-oss's other copies, too."""
    if "revision" not in args or "gpus_per_node" in args:  # each of several machines resolves it
        return dict(args)
    from huggingface_hub import snapshot_download  # noqa: PLC0415

    left_out = ["original/*", "metal/*"]
    local = {name: value for name, value in args.items() if name != "revision"}
    local["model"] = snapshot_download(
        args["model"], revision=args["revision"], ignore_patterns=left_out
    )
    return local

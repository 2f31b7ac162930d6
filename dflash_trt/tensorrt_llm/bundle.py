"""Writer of a bundle: both checkpoints, the arguments of `LLM`, its environment.
```
engines/tensorrt_llm/   engine.json, llm_args.yaml, env.sh, drafter/, target/ (unless on the Hub)
launch/                 single_node.sh, slurm.sh, mpi.sh, task.sh
```

Paths in it are relative: the directory can be moved, with `checkpoints: link` only on its machine.
"""

import shlex
from pathlib import Path
from typing import Any

from dflash_trt.checkpoints import Model, Pair, Report, open_files, small_files
from dflash_trt.config import BuildConfig, TensorRTLLM
from dflash_trt.files import copy_file
from dflash_trt.planning import lowest_believed, machine
from dflash_trt.tensorrt_llm.info import ARGS_FILE, KIND, BundleInfo, write_info
from dflash_trt.tensorrt_llm.llm_args import env_vars
from dflash_trt.tensorrt_llm.schema import LlmArgs

SCRIPTS = ("single_node.sh", "slurm.sh", "mpi.sh", "task.sh")


def checkpoint_files(model: Model[Any], *, weights: bool = True) -> list[Path]:
    """Return a checkpoint's files for a bundle: JSON files, templates and weights.

    Raises CheckpointError unless all weights exist and are complete.
    """
    found = open_files(model.directory)[0] if weights else []
    return sorted({*small_files(model.directory), *found})


def write_bundle(
    directory: Path, config: BuildConfig, pair: Pair, args: LlmArgs, report: Report
) -> None:
    """Write `directory/engines/tensorrt_llm` and `directory/launch`.

    A target that stays on the Hub must have a commit as revision.
    """
    section = config.engine
    assert isinstance(section, TensorRTLLM)
    by_id, link = section.checkpoints == "hub", section.checkpoints == "link"
    engine = directory / "engines" / KIND
    engine.mkdir(parents=True, exist_ok=True)
    if not pair.drafter.absent:
        _put(pair.drafter, engine / "drafter", report, link=link)
    if not by_id and section.quantize is None:  # quantizing writes the target there
        _put(pair.target, engine / "target", report, link=link)

    head = (
        f"# {config.name}: arguments of LLM() of TensorRT-LLM {section.version}.\n"
        "# Paths start at this folder.\n"
    )
    (engine / ARGS_FILE).write_text(head + args.to_yaml(), encoding="utf-8")

    made_for = machine(section.hardware)
    environment = env_vars(config, pair, made_for)
    lines = [f"export {name}={shlex.quote(value)}" for name, value in sorted(environment.items())]
    (engine / "env.sh").write_text("\n".join(["# shellcheck shell=sh", *lines]) + "\n")

    ranks = args.tensor_parallel_size
    gpus = min(ranks, made_for.gpus)
    lowest, lowest_by = lowest_believed(drafter_name(config), args.drafts, "TensorRT-LLM")
    info = BundleInfo(
        kind=KIND,
        version=section.version,
        machine=made_for.name,
        gpu=made_for.gpu.name,
        sm=made_for.gpu.sm,
        memory_bytes=made_for.gpu.memory_bytes,
        gpus=gpus,
        nodes=-(-ranks // gpus),
        architecture=pair.target.architecture,
        environment=environment,
        lowest=lowest,
        lowest_by=lowest_by,
    )
    write_info(engine, info)
    _write_scripts(directory / "launch", info)


def _put(model: Model[Any], directory: Path, report: Report, *, link: bool) -> None:
    files = checkpoint_files(model)
    directory.mkdir(parents=True)
    step = f"{'linking' if link else 'copying'} the {model.role}"
    for done, file in enumerate(files):
        report(step, done, len(files))
        copy = directory / file.relative_to(model.directory)
        copy.parent.mkdir(exist_ok=True)
        if link:
            copy.symlink_to(file.resolve())
        else:
            copy_file(file, copy)
    report(step, len(files), len(files))


def drafter_name(config: BuildConfig) -> str:
    """Return the name of the drafter's id or directory, as in published figures, or ""."""
    drafter = config.drafter
    return Path(drafter.hub or str(drafter.path)).name if drafter else ""


def _write_scripts(directory: Path, info: BundleInfo) -> None:
    directory.mkdir()
    values = {"NODES": info.nodes, "GPUS": info.gpus, "RANKS": info.nodes * info.gpus}
    for name in SCRIPTS:
        text = (Path(__file__).with_name("launch") / name).read_text(encoding="utf-8")
        for key, value in values.items():
            text = text.replace(f"@{key}@", str(value))
        (directory / name).write_text(text, encoding="utf-8")
        (directory / name).chmod(0o755)

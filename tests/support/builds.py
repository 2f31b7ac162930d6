"""Configs of a pair in two directories, what a build of it holds, and checkpoints made wrong."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx

from dflash_trt.builder.engines import EngineOptions, build_drafter, build_target
from dflash_trt.builder.pipeline import BuildResult, build
from dflash_trt.checkpoints import Drafter, Target, load_drafter, load_target
from dflash_trt.checks import check_pair
from dflash_trt.config import BuildConfig


def quiet(step: str, done: int, total: int) -> None:
    assert 0 <= done <= total


def config_of(directory: Path, **sections: Any) -> BuildConfig:
    paths = {role: {"path": directory / role} for role in ("target", "drafter")}
    return BuildConfig.model_validate({"name": "tiny", **paths, **sections})


def build_pair(directory: Path, output: Path, **engine: Any) -> BuildResult:
    return build(config_of(directory, engine=engine), output, quiet)


def build_engines(
    target_dir: Path, drafter_dir: Path, directory: Path, **options: Any
) -> tuple[Target, Drafter]:
    """Check a pair and write `directory/target` and `.../drafter`; options: of `EngineOptions`."""
    target, drafter = load_target(target_dir), load_drafter(drafter_dir)
    check_pair(target, drafter, None)
    write_engines(target, drafter, directory, EngineOptions(**{"threads": 1, **options}))
    return target, drafter


def write_engines(
    target: Target, drafter: Drafter, directory: Path, options: EngineOptions
) -> None:
    """Write `directory/target` and `directory/drafter`; the pair is not checked."""
    for role in ("target", "drafter"):
        (directory / role).mkdir(parents=True)
    build_target(target, drafter.spec, directory / "target", options)
    build_drafter(drafter, target, directory / "drafter", options)


def with_float_inputs(engine: Path, directory: Path) -> Path:
    """Copy an engine whose products in blocks do not round their inputs."""
    shutil.copytree(engine, directory)
    model = onnx.load(directory / "model.onnx", load_external_data=False)
    levels = [
        attribute
        for node in model.graph.node
        for attribute in node.attribute
        if attribute.name == "accuracy_level"
    ]
    assert levels
    for level in levels:
        level.i = 0
    onnx.save(model, directory / "model.onnx")
    return directory


def contents(directory: Path) -> dict[str, bytes]:
    files = [file for file in directory.rglob("*") if file.is_file()]
    return {file.relative_to(directory).as_posix(): file.read_bytes() for file in files}


def assert_only(directory: Path, *outputs: str) -> None:
    """Assert that nothing lies beside the pair and the outputs, hidden or not."""
    assert {path.name for path in directory.iterdir()} == {"target", "drafter", *outputs}


def edit(directory: Path, **changes: object) -> None:
    """Set fields of config.json; None removes one."""
    file = directory / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def edit_weights(directory: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    from safetensors.torch import load_file, save_file  # noqa: PLC0415  (it loads torch)

    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})

"""Loading of engines of any kind."""

import importlib
from pathlib import Path

from dflash_trt.engines.info import ENGINE_FILE, EngineInfo, read_info
from dflash_trt.engines.step import Engine
from dflash_trt.errors import EngineError
from dflash_trt.files import read_json

MODULES = {  # modules with an `Engine` class
    "onnxruntime": "dflash_trt.engines.onnxruntime",
    "tensorrt": "dflash_trt.engines.tensorrt.engine",
}
ON_CUDA = "dflash_trt.engines.cuda.engine"  # for graphs on a GPU


def engine_kind(directory: Path) -> str:
    """Return the kind in `engine.json`; EngineError if it is invalid or cannot run here."""
    path = directory / ENGINE_FILE
    try:
        kind = read_json(path)["kind"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise EngineError(
            f"{path} is not an engine description ({error})", "Run `dflash-trt build` again."
        ) from error
    if not isinstance(kind, str) or kind not in MODULES:
        raise EngineError(f"{path} describes a {kind!r} engine", f"Known: {', '.join(MODULES)}")
    return kind


def load_engine(directory: Path, alone: bool = False) -> Engine:
    """Load a target or a drafter; EngineError if that fails.

    alone: one engine per process, taking turns with another process on the same cores.
    """
    kind = engine_kind(directory)
    on_cuda = read_info(directory, kind).device == "cuda"
    module = importlib.import_module(ON_CUDA if on_cuda else MODULES[kind])
    turns = {"alone": True} if alone and kind == "onnxruntime" and not on_cuda else {}
    engine: Engine = module.Engine(directory, **turns)
    return engine


def roles(engines: Path) -> list[Path]:
    """Return the directories of the target's engine and, if any, the drafter's."""
    drafter = engines / "drafter"
    return [engines / "target", *([drafter] if drafter.is_dir() else [])]


def load_engines(engines: Path) -> tuple[Engine, Engine | None]:
    """Load the target and the drafter, if any."""
    target, *others = map(load_engine, roles(engines))
    return target, others[0] if others else None


def read_infos(engines: Path) -> list[EngineInfo]:
    """Read the target's and the drafter's `engine.json`, if any."""
    return [read_info(each, engine_kind(each)) for each in roles(engines)]

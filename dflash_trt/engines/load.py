"""An engine of whichever kind its directory says."""

import importlib
from pathlib import Path

from dflash_trt.engines.info import ENGINE_FILE
from dflash_trt.engines.step import Engine
from dflash_trt.errors import EngineError
from dflash_trt.files import read_json

MODULES = {  # where a kind's `Engine` is
    "onnxruntime": "dflash_trt.engines.onnxruntime",
    "tensorrt": "dflash_trt.engines.tensorrt.engine",
}


def engine_kind(directory: Path) -> str:
    """EngineError where `engine.json` does not say a kind that can be run here."""
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


def load_engine(directory: Path) -> Engine:
    """Load a target or a drafter; EngineError when it cannot be."""
    module = importlib.import_module(MODULES[engine_kind(directory)])
    engine: Engine = module.Engine(directory)
    return engine

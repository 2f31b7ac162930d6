"""A build of kind `tensorrt_llm` for the stand-in in `standins/`, which decodes on a CPU."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.builder.pipeline import build
from tests.support.builds import config_of, quiet

STANDINS = Path(__file__).parents[1] / "standins" / "packages"


def write_llm_build(directory: Path, pair_dir: Path, args: dict[str, Any], **serving: Any) -> Path:
    """Write a bundle as `build` does; args: of `LLM(...)`, over those chosen by rule."""
    engine = {"kind": "tensorrt_llm", "gpus": 1, "args": args}
    build(config_of(pair_dir, engine=engine, serving=serving), directory, quiet)
    return directory


@contextmanager
def standins() -> Iterator[None]:
    """Let processes that start meanwhile find the stand-in, and a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(STANDINS), prepend=os.pathsep)
        patch.setenv("PATH", str(STANDINS / "bin"), prepend=os.pathsep)
        yield

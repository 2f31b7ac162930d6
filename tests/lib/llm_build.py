"""A build of kind `tensorrt_llm` for the stand-in in `standins/`, which decodes on a CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.build.run import build
from dflash_trt.config import BuildConfig

STANDINS = Path(__file__).parents[1] / "fakes" / "standins"


def write_llm_build(directory: Path, pair_dir: Path, args: dict[str, Any], **serving: Any) -> Path:
    """As `build` writes it; args: of `LLM(...)`, over those that are chosen by rule."""
    config = BuildConfig(
        name="tiny",
        target={"path": pair_dir / "target"},
        drafter={"path": pair_dir / "drafter"},
        engine={"kind": "tensorrt_llm", "gpus": 1, "checkpoints": "link", "args": args},
        serving=serving,
    )
    build(config, directory, lambda step, done, total: None)
    return directory


@contextmanager
def standins() -> Iterator[None]:
    """Processes that start meanwhile find the stand-in, and a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(STANDINS), prepend=os.pathsep)
        patch.setenv("PATH", str(STANDINS / "bin"), prepend=os.pathsep)
        yield

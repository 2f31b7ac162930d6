"""Pairs and engines that several test files share, each built once a session."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from pairs import Pair, make_pair, teach

from dflash_trt.build.engines import build_drafter, build_target
from dflash_trt.build.run import build
from dflash_trt.checkpoints import Drafter, Target, check_pair, load_drafter, load_target
from dflash_trt.config import load_config

# programs that dev brings, shellcheck for one, where the environment is not activated
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
# one thread: the shapes are tiny, and texts must not depend on how a machine splits a sum
torch.set_num_threads(1)
transformers.utils.logging.disable_progress_bar()

SLOTS = 4
MAX_SEQ_LEN = 160


@dataclass(frozen=True)
class BuiltPair:
    """A random pair, its checkpoints as the package reads them, and its two engine directories."""

    pair: Pair
    texts: list[list[int]]  # greedy texts of the target; the drafter knows them when `taught`
    target: Target
    drafter: Drafter
    target_engine: Path
    drafter_engine: Path


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo pair as `build` writes it; shared, so not to be changed."""
    directory = tmp_path_factory.mktemp("demo") / "built"
    config = load_config(Path(__file__).parents[1] / "build_configs" / "pycode.yaml")
    build(config, directory, lambda *_: None)
    return directory


BuildPair = Callable[..., BuiltPair]


def build_engines(
    target_dir: Path,
    drafter_dir: Path,
    directory: Path,
    *,
    slots: int,
    max_seq_len: int,
    **options: Any,
) -> tuple[Target, Drafter]:
    """Check a pair and write `directory/target` and `directory/drafter`, as `build` does.

    options: of `build_target` and `build_drafter`.
    """
    target, drafter = load_target(target_dir), load_drafter(drafter_dir)
    check_pair(target, drafter, None)
    (directory / "target").mkdir(parents=True)
    (directory / "drafter").mkdir()
    common: dict[str, Any] = {
        "slots": slots,
        "max_seq_len": max_seq_len,
        "threads": 1,
        "progress": lambda name: None,
        **options,
    }
    build_target(target, drafter.spec, directory / "target", **common)
    build_drafter(drafter, target, directory / "drafter", **common)
    return target, drafter


def built_from(
    pair: Pair, directory: Path, *, taught: bool = True, max_seq_len: int = MAX_SEQ_LEN
) -> BuiltPair:
    """A pair (see `pairs.write_pair`), taught or not, with its engines in `directory/engines`."""
    texts = teach(pair, steps=120 if taught else 0)
    engines = directory / "engines"
    target, drafter = build_engines(
        pair.target_dir, pair.drafter_dir, engines, slots=SLOTS, max_seq_len=max_seq_len
    )
    return BuiltPair(pair, texts, target, drafter, engines / "target", engines / "drafter")


@pytest.fixture(scope="session")
def built_pair(tmp_path_factory: pytest.TempPathFactory) -> BuildPair:
    """`built_pair(taught=True, **shape)`: make a pair (see `pairs.make_pair`) and its engines."""
    cache: dict[tuple[object, ...], BuiltPair] = {}
    numbers = itertools.count()

    def build(*, taught: bool = True, max_seq_len: int = MAX_SEQ_LEN, **shape: Any) -> BuiltPair:
        key = (taught, max_seq_len, *sorted(shape.items()))
        if key not in cache:
            directory = tmp_path_factory.mktemp(f"pair{next(numbers)}")
            pair = make_pair(directory, **shape)
            cache[key] = built_from(pair, directory, taught=taught, max_seq_len=max_seq_len)
        return cache[key]

    return build

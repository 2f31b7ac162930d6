"""Pairs and engines that several test files share, each built once a session."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

from dflash_trt.builder.pipeline import build
from dflash_trt.speculation import Adaptive
from tests.support.builds import build_pair
from tests.support.built_pairs import MAX_SEQ_LEN, BuildPair, BuiltPair, built_from
from tests.support.pairs import make_pair
from tests.support.pycode import demo_config

if TYPE_CHECKING:
    from tests.support.equality import Case

# programs that dev brings, shellcheck for one, where the environment is not activated
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
# tests start servers beside gRPC clients, whose fork handlers spoil the child's files
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
# one thread: the shapes are tiny, and texts must not depend on how a machine splits a sum
torch.set_num_threads(1)
transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the demo pair as `build` writes it; shared, so not to be changed."""
    directory = tmp_path_factory.mktemp("demo") / "built"
    build(demo_config(), directory, lambda *_: None)
    return directory


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny pair, `target` and `drafter`, and its build `built`; not to be changed."""
    directory = tmp_path_factory.mktemp("original")
    make_pair(directory)
    build_pair(directory, directory / "built")
    return directory


@pytest.fixture
def pair(original: Path, tmp_path: Path) -> Path:
    """Return a copy of `original` that may be changed."""
    return Path(shutil.copytree(original, tmp_path / "pair"))


@pytest.fixture(scope="session")
def built_pair(tmp_path_factory: pytest.TempPathFactory) -> BuildPair:
    """Return `built_pair(taught=True, **shape)`, which makes a pair and its engines."""
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


@pytest.fixture(scope="session")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """Return `case_of(name)`: a taught pair of `families.make` and the references' results."""
    from tests.support import equality, families  # noqa: PLC0415

    @cache
    def make(name: str) -> Case:
        directory = tmp_path_factory.mktemp("case")
        built = built_from(families.make(name, directory), directory)
        of_family = name in families.DENSE | families.MOE | families.HYBRIDS
        return equality.case_for(built, 64 if of_family else equality.NEW_TOKENS)

    return make


@pytest.fixture(scope="session")
def case(request: pytest.FixtureRequest, case_of: Callable[[str], Case]) -> Case:
    return case_of(request.param)


@pytest.fixture
def made_up_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep measured times out of tests whose made-up costs force choices."""
    monkeypatch.setattr(Adaptive, "timed", lambda *_: None)

"""Random pairs with their engines, which several test files share (see `conftest.built_pair`)."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dflash_trt.checkpoints import Drafter, Target
from tests.support.builds import build_engines
from tests.support.pairs import Pair, teach

SLOTS = 4
MAX_SEQ_LEN = 160


@dataclass(frozen=True)
class BuiltPair:
    pair: Pair
    texts: list[list[int]]  # greedy texts of the target; the drafter knows them when `taught`
    target: Target
    drafter: Drafter
    target_engine: Path
    drafter_engine: Path


BuildPair = Callable[..., BuiltPair]


def built_from(
    pair: Pair, directory: Path, *, taught: bool = True, max_seq_len: int = MAX_SEQ_LEN
) -> BuiltPair:
    """Build engines of a pair (`pairs.write_pair`) in `directory/engines`."""
    texts = teach(pair, steps=120 if taught else 0)
    engines = directory / "engines"
    target, drafter = build_engines(
        pair.target_dir, pair.drafter_dir, engines, slots=SLOTS, max_seq_len=max_seq_len
    )
    return BuiltPair(pair, texts, target, drafter, engines / "target", engines / "drafter")

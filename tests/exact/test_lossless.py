"""Whatever the family, storage, policy, reuse, grammar and sampling: the text is the target's.

`make prove` asks 20,000 times; here a pair of each storage is asked 64 times.
"""

from collections import Counter
from pathlib import Path

import pytest

from tests.support import losslessness
from tests.support.families import FORMATS


@pytest.mark.parametrize("seed", range(len(losslessness.STORAGE)), ids=[*losslessness.STORAGE])
def test_every_text_is_the_targets(seed: int, tmp_path: Path) -> None:
    cases, wrong, counts = losslessness.run(seed, tmp_path, requests=32, batches=2)
    assert cases == 64
    assert not wrong
    assert counts["plain"] > 0


@pytest.mark.soak
def test_all_storage_and_kinds_of_rounds_are_met(tmp_path: Path) -> None:
    counts, runs = Counter[str](), 0
    for seed in range(18):
        cases, wrong, met = losslessness.run(seed, tmp_path / str(seed))
        assert not wrong, wrong[:1]
        runs += cases
        counts.update(met)
    kinds = ("plain", "drafts", "lookup", "reused", "grammar")
    assert min(counts[kind] for kind in kinds) > runs / 100
    assert all(counts[f"storage {each}"] for each in losslessness.STORAGE)
    assert all(counts[f"format {each}"] for each in FORMATS)
    assert counts["swapped"]

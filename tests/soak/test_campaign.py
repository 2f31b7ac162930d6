"""The first hundredth of `make prove`: nothing is found, and everything is met."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import losslessness
import prove
import pytest
from families import FORMATS

pytestmark = pytest.mark.soak


def test_the_first_hundredth(tmp_path: Path) -> None:
    lines = prove.campaign(0.01, [*prove.PARTS], tmp_path / "results.jsonl")
    assert not [(line["part"], line["seed"], line["wrong"]) for line in lines if line["wrong"]]


def test_all_storage_and_kinds_of_rounds_are_met(tmp_path: Path) -> None:
    lines = prove.campaign(0.1, ["lossless"], tmp_path / "results.jsonl")
    counts, runs = Counter[str](), sum(line["cases"] for line in lines)
    for line in lines:
        assert not line["wrong"], line["wrong"][:1]
        counts.update(line["counts"])
    kinds = ("plain", "chain", "tree", "lookup", "reused", "grammar")
    assert min(counts[kind] for kind in kinds) > runs / 100
    assert all(counts[f"storage {each}"] for each in losslessness.STORAGE)
    assert all(counts[f"format {each}"] for each in FORMATS)
    assert counts["swapped"]

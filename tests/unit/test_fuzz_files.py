"""Mutated files of every kind, a few of them: `fuzz_files.py` is for as many as you like."""

from __future__ import annotations

import pytest
from fuzz_files import main

pytestmark = pytest.mark.models

CASES = 1200


@pytest.mark.parametrize("seed", [0])
def test_any_file_gives_an_answer_of_ours(seed: int) -> None:
    found = main(CASES, seed)
    assert not found["unexpected"], found["unexpected"][:3]
    assert sum(found["came"].values()) == CASES
    assert found["grown_mib"] < 1024
    for kind in {name.rsplit(" ", 1)[0] for name in found["came"]}:
        # the cases mean something: of most kinds some are refused
        refused = found["came"].get(f"{kind} refused", 0)
        assert refused or kind in ("built/engines/costs.json", "target/added_tokens.json")

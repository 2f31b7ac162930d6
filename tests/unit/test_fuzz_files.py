"""Mutated files of every kind, a few of them and all that `make prove` keeps."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import fuzz_files
import guided
import pytest

pytestmark = pytest.mark.models

CASES = 1200


@pytest.mark.parametrize("seed", [0])
def test_any_file_gives_an_answer_of_ours(seed: int) -> None:
    found = fuzz_files.main(CASES, seed)
    assert not found["unexpected"], found["unexpected"][:3]
    assert sum(found["came"].values()) == CASES
    assert found["grown_mib"] < 1024
    for kind in {name.rsplit(" ", 1)[0] for name in found["came"]}:
        # the cases mean something: of most kinds some are refused
        refused = found["came"].get(f"{kind} refused", 0)
        assert refused or kind in ("built/engines/costs.json", "target/added_tokens.json")


def test_kept_files_give_an_answer_of_ours(tmp_path: Path) -> None:
    """Those that reached new lines, or were found."""
    home, report = tmp_path / "home", tmp_path / "report"
    home.mkdir()
    prepared = [fuzz_files.__file__, "prepare", str(home)]
    replayed = [guided.__file__, "replay", str(home), str(report)]
    for line in (prepared, replayed):
        subprocess.run([sys.executable, *line], check=True, stdin=subprocess.DEVNULL)
    found = json.loads(report.read_text())
    assert not found["wrong"], found["wrong"][:3]
    with tarfile.open(guided.PACKED) as packed:
        assert sum(sum(each.values()) for each in found["came"].values()) == len(packed.getnames())

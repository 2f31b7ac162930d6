"""`make prove` goes on where it was killed, says what it finds, and its planted faults apply."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import planted
import prove
import pytest


class Ended(NamedTuple):
    """A seed of ten cases, of which the third is wrong."""

    part: str
    seed: int

    def result(self) -> dict[str, Any]:
        wrong = ["it differs"] * (self.seed == 2)
        line = {"part": self.part, "seed": self.seed, "package": prove.package(), "seconds": 1.0}
        return line | {"cases": 10, "counts": {"met": 1}, "wrong": wrong}


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(prove, "package", lambda: "0" * 12)
    monkeypatch.setattr(prove.AtWork, "begin", Ended)
    monkeypatch.setattr(prove.os, "cpu_count", lambda: 1)
    part = prove.Part(prove.front, 10, 100)
    monkeypatch.setattr(prove, "PARTS", dict.fromkeys(("one", "other"), part))
    return tmp_path / "prove/results.jsonl"


def test_a_killed_campaign_goes_on(results: Path) -> None:
    prove.campaign(0.2, ["one"], results)
    with results.open("a") as stream:
        print(json.dumps({"package": "another"}), file=stream)
        stream.write('{"part": "on')
    lines = prove.campaign(0.5, ["one"], results)
    assert [line["seed"] for line in lines] == [0, 1, 2, 3, 4]
    assert prove.campaign(0.5, ["one"], results) == lines
    assert prove.campaign(0.1, ["other"], results)[-1]["part"] == "other"
    text = prove.report(lines)
    assert "| one | 5 | 50 | 50.0% | 1 | 5 |" in text
    assert "one 2: it differs" in text


def test_the_first_finding_may_end_it(results: Path) -> None:
    assert len(prove.campaign(1, ["one"], results, first=True)) == 3


def test_whatever_a_seed_dies_of_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(seed: int, directory: Path) -> Any:
        raise SystemExit(f"seed {seed}")

    monkeypatch.setattr(prove, "PARTS", {"one": prove.Part(dies, 10, 100)})
    assert "seed 7" in prove.one_seed("one", 7)["wrong"][0]
    at_work = prove.AtWork.begin("one", 0)  # in whose process there is no such part
    assert at_work.process.wait(60) == 2
    died = at_work.result()
    assert died is not None
    assert died["cases"] == 10
    assert "its process ended with 2" in died["wrong"][0]


def test_every_fault_can_be_planted(tmp_path: Path) -> None:
    listed = planted.faults()
    assert len(listed) == 44
    assert {fault.part for fault in listed} <= prove.PARTS.keys()
    for fault in listed:
        (tmp_path / fault.file).parent.mkdir(parents=True, exist_ok=True)
        text = (prove.ROOT / fault.file).read_text(encoding="utf-8")
        (tmp_path / fault.file).write_text(text, encoding="utf-8")
        fault.apply(tmp_path)
        compile((tmp_path / fault.file).read_text(encoding="utf-8"), fault.file, "exec")
        with pytest.raises(ValueError, match="0 times"):
            fault.apply(tmp_path)

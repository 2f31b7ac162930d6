"""The scripts of tests/gpu, on the CPU with tiny models: what a lent GPU would run."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import offline, sizes, table, texts, wheels
from tests.gpu.sparse import Sizes
from tests.support.builds import build_pair
from tests.support.pairs import make_endless, make_pair

TINY = Sizes(
    hidden=32,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=16,
    wide=48,
    vocab=300,
    block=4,
    taps=(0, 1),
    draft_layers=1,
    longest=400,
)


def test_sizes_are_measured_and_tabled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    median = sizes.median_ms
    monkeypatch.setattr(sizes, "median_ms", lambda work: median(work, 1))
    results = tmp_path / "results.json"
    sizes.main(tmp_path / "pair", results, TINY, (1, 2), (64,), (32,))
    found = json.loads(results.read_text())
    measured = [(each["what"], each["streams"], each["width"]) for each in found["measured"]]
    steps = [("step", 1, width) for width in sizes.WIDTHS] + [("draft", 1, 4)]
    steps += [("step", 2, 1), ("step", 2, 4), ("draft", 2, 4), ("prompt", 1, 32)]
    assert measured == [*steps, ("round", 1, 4), ("round", 2, 4)]
    assert all(each["milliseconds"] > 0 for each in found["measured"])
    # the matrices of 16 bits, and a token's keys and values
    matrices = 3 * (32 * (4 + 2 * 2 + 4) * 16 + 3 * 32 * 48) + 300 * 32
    one_token = 3 * 2 * 2 * 16
    floor = 2 * (matrices + 64 * one_token) / found["copied GB/s"] / 1e6
    assert found["measured"][0]["floor"] == pytest.approx(floor)
    lines = [*table.tables({"sizes": found, "others": {"a way": 2.5, "another": "failed"}})]
    assert len([line for line in lines if line.startswith("| step")]) == 7
    assert lines[-2:] == ["- a way: 2.5", "- another: failed"]


def test_a_large_wheel_travels_in_pieces(tmp_path: Path) -> None:
    content = bytes(range(256))
    small, large = tmp_path / "small.whl", tmp_path / "large.whl"
    small.write_bytes(content[:20])
    large.write_bytes(content)
    for wheel in (small, large):
        wheels.cut(wheel, piece=20)
    assert small.is_file()
    assert not large.exists()
    pieces = [*tmp_path.glob("large.whl.part-*-of-13")]
    assert len(pieces) == 13  # in the order of their numbers, not of their names
    late_piece = pieces[3].rename(tmp_path / "not here yet")
    offline.join(tmp_path, tmp_path / "joined")
    assert not [*(tmp_path / "joined").iterdir()]
    late_piece.rename(pieces[3])
    offline.join(tmp_path, tmp_path / "joined")
    assert [path.name for path in (tmp_path / "joined").iterdir()] == ["large.whl"]
    assert (tmp_path / "joined" / "large.whl").read_bytes() == content


def test_texts_are_compared(tmp_path: Path) -> None:
    make_endless(make_pair(tmp_path))
    build_pair(tmp_path, tmp_path / "built", kind="pytorch", dtype="float32")
    prompts = [[(11 * i + k) % 300 for i in range(9)] for k in range(3)]
    theirs = texts.greedy(tmp_path / "built", prompts, 12)
    same = texts.compare(tmp_path / "built", prompts, theirs)
    assert same == {"texts": 3, "differ": 0, "near ties": 0, "gaps": []}
    theirs[1][4] = (theirs[1][4] + 1) % 300
    changed = texts.compare(tmp_path / "built", prompts, theirs)
    assert (changed["texts"], changed["differ"]) == (3, 1)
    found = [*texts.drafted(tmp_path / "built", prompts, (1, 3), 12)]
    assert [(each["streams"], each["texts"], each["differ"]) for each in found] == [
        (streams, 3, 0) for _ in range(2) for streams in (1, 3)
    ]
    assert [*table.tables({"compared": changed, "drafted": found})]


def test_parts_that_fail_do_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = runpy.run_path(str(Path(sizes.__file__).with_name("offline.py")))
    runs = script["Runs"]({})
    names = script["Runs"].run.__globals__
    names |= {"OUTPUT": tmp_path, "RESULTS": tmp_path / "results.json"}
    assert not runs.run("broken", "-c", "raise SystemExit(3)")
    assert not runs.run("slow", "-c", "import time; time.sleep(9)", limit=0.2)
    write = "import sys, pathlib; pathlib.Path(sys.argv[1]).write_text('[7]')"
    runs.measure("good", "-c", write)
    kept = json.loads((tmp_path / "results.json").read_text())
    exits = [kept[f"{name}: exit"] for name in ("broken", "slow", "good")]
    assert exits == [3, "not done after 0.2 s", 0]
    assert kept["good"] == [7]
    later = script["Runs"]({})
    later.load()
    assert later.results == kept


def test_one_part_may_be_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = runpy.run_path(str(Path(sizes.__file__).with_name("offline.py")))
    done: list[str] = []
    parts = {name: lambda *_, name=name: done.append(name) for name in script["PARTS"]}
    places = {"OUTPUT": tmp_path, "RESULTS": tmp_path / "results.json", "PARTS": parts}
    (tmp_path / "site").mkdir()
    (tmp_path / "results.json").write_text("{}")
    script["main"].__globals__.update(places)
    script["main"](tmp_path, None, ["texts"])
    script["main"](tmp_path, None, [])
    assert done == ["texts", "sizes", "texts", "tests"]


def test_the_table_is_a_script(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text("{}")
    command = [sys.executable, table.__file__, tmp_path / "results.json"]
    assert subprocess.run(command, capture_output=True, check=True).stdout == b"\n"

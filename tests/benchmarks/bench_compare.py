"""Whether `bench compare` flags what it should: a slower draft step, not the same thing twice.

python -m pytest tests/benchmarks/bench_compare.py -o addopts= -s
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import demo_pair
import pytest
from pycode import prompt_ids

from dflash_trt.bench import Cell, Plan, Run, compare, measure_engine
from dflash_trt.decoding import rounds

TRIES, LIMIT = 20, 0.05
PASSES = 15  # the interval of 7 is nearly their whole range: one disturbed pass hides a change
SLEEP = 0.002  # seconds: half a round


def measured() -> Run:
    plan = Plan(tasks={"pycode": prompt_ids(4)}, max_tokens=32, draft_tokens=(7,), repeats=PASSES)
    cells: list[Cell] = []
    measure_engine(demo_pair.engines(), demo_pair.THREADS, plan, lambda *_: None, cells.append)
    return Run(name="", target="", drafter="", options={}, cells=cells, peak_memory=0)


def verdict(before: Run, after: Run) -> str:
    found = compare(before, after, LIMIT, absolute=False)
    assert all(each.verdict == "same" for each in found if each.figure != "speedup")
    return next(each.verdict for each in found if each.figure == "speedup")


def test_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [measured() for _ in range(TRIES + 1)]
    same = [verdict(a, b) for a, b in pairwise(runs)]
    draft = rounds.draft

    def slower(*arguments: Any) -> Any:
        time.sleep(SLEEP)
        return draft(*arguments)

    monkeypatch.setattr(rounds, "draft", slower)
    planted = [verdict(run, measured()) for run in runs[:TRIES]]
    demo_pair.show(
        f"bench compare, limit {LIMIT}",
        [
            f"the same thing twice: not flagged in {same.count('same')} of {TRIES}",
            f"{SLEEP * 1e3:.1f} ms more in the draft step: found in "
            f"{planted.count('worse')} of {TRIES}",
        ],
    )
    assert same == ["same"] * TRIES
    assert planted == ["worse"] * TRIES

"""What others compute is seen, and what a server takes follows it, not at once."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from built_pairs import BuildPair
from dflash_trt.serving.server.cores import LOOKS, WINDOW, Others, follows_cores, watch_cores

from dflash_trt.engines import read_info, write_info
from dflash_trt.serving.server import cores

TICKS = os.sysconf("SC_CLK_TCK")


class Machine:
    """Four CPUs, of which three are this process's, and a clock."""

    def __init__(self, root: Path) -> None:
        self.root, self.now = root, 100.0
        (root / "proc").mkdir()
        self.compute([0, 0, 0, 0], 0.0)

    def compute(self, busy: list[float], seconds: float) -> None:
        """busy: seconds since the boot that each CPU has computed, in halves of user and stolen."""
        self.now += seconds
        lines = ["cpu  1 2 3 4 5 6 7 8 9 10"]
        for cpu, each in enumerate(busy):
            half = int(each * TICKS / 2)
            lines.append(f"cpu{cpu} {half} 0 0 {int(self.now * TICKS)} 50 0 0 {half} {half} 0")
        (self.root / "proc/stat").write_text("\n".join([*lines, "intr 1 2", "ctxt 12"]))

    def process(self, pid: int, session: int, seconds: float) -> None:
        directory = self.root / "proc" / str(pid)
        directory.mkdir(exist_ok=True)
        quarter = int(seconds * TICKS / 4)
        words = f"{pid} (a ) b) S 1 {session} {session} 0 -1 4194304 10 20 0 0"
        (directory / "stat").write_text(f"{words} {' '.join([str(quarter)] * 4)} 20 0 7 0\n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 3})
    monkeypatch.setattr(cores, "time", SimpleNamespace(monotonic=lambda: machine.now))
    return machine


def test_cores_that_others_keep_busy_are_not_free(machine: Machine) -> None:
    others = Others(lambda: [7, 9], machine.root)
    machine.compute([10, 0, 10, 0], 10.0)  # CPU 2 is not ours
    assert others.busy() == 1.0
    machine.compute([20, 1, 20, 2], 10.0)
    assert others.free_cores() == 2  # 1.3 are busy
    machine.compute([30, 11, 30, 12], 10.0)
    assert others.free_cores() == 1  # all are
    machine.now += 10
    assert others.free_cores() == 3


def test_where_nothing_is_to_be_seen_all_are_free(machine: Machine) -> None:
    others = Others(lambda: [7], machine.root / "hidden")
    machine.now += 10
    assert others.free_cores() == 3


def test_what_is_ours_does_not_count(machine: Machine) -> None:
    machine.process(7, 7, 4)
    machine.process(12, 9, 4)  # in the session of 9
    machine.process(13, 1, 4)
    others = Others(lambda: [7, 9], machine.root)
    machine.compute([10, 10, 0, 10], 10.0)
    machine.process(7, 7, 14)
    machine.process(12, 9, 12)
    machine.process(13, 1, 14)
    assert others.busy() == pytest.approx(1.2)


def test_a_busy_program_is_seen_on_this_machine() -> None:
    program = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        everyone, but_it = Others(lambda: []), Others(lambda: [program.pid])
        stat = Path(f"/proc/{program.pid}/stat")
        before, began = _seconds(stat), time.monotonic()
        while _seconds(stat) < before + 1.0:
            assert time.monotonic() < began + 60
            time.sleep(0.05)
        took = time.monotonic() - began
        computed, difference = _seconds(stat) - before, everyone.busy() - but_it.busy()
        assert difference * took == pytest.approx(computed, rel=0.2)
    finally:
        program.kill()
        program.wait()


def _seconds(stat: Path) -> float:
    words = stat.read_text().rpartition(") ")[2].split()
    return (int(words[11]) + int(words[12])) / TICKS


@pytest.mark.parametrize(
    ("free", "changes"),
    [
        ([2] * 30, []),
        ([1] * (LOOKS - 1) + [2] + [1] * (LOOKS - 1), []),  # one look at rest begins it anew
        ([1] * LOOKS, [1]),
        ([1] * LOOKS + [2] * (2 * LOOKS), [1, 2]),  # the second change takes twice as long
        ([1] * LOOKS + [2] * (2 * LOOKS - 1), [1]),
    ],
)
def test_a_choice_is_made_anew_when_it_is_long_wrong(
    free: list[int], changes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _changes(2, free, monkeypatch) == changes


def test_few_cores_more_are_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _changes(8, [9] * 30, monkeypatch) == []
    assert _changes(8, [10] * LOOKS, monkeypatch) == [10]
    assert _changes(8, [7] * LOOKS, monkeypatch) == [7]


def test_a_look_that_fails_is_none_that_was_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _changes(2, [1] * (LOOKS - 1) + [0] + [1], monkeypatch) == []


def _changes(has: int, free: list[int], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    looks: Iterator[int] = iter(free)
    changed, waited = [has], list[float]()

    def wait(seconds: float) -> bool:
        waited.append(seconds)
        return len(waited) > len(free)

    def look() -> int:
        if not (found := next(looks)):
            raise OSError(errno.EMFILE, "too many open files")
        return found

    seen = SimpleNamespace(free_cores=look)
    monkeypatch.setattr(cores, "Others", lambda ours: seen)
    watch_cores(lambda: [], lambda: changed[-1], changed.append, wait)
    assert waited == [WINDOW] * (len(free) + 1)
    return changed[1:]


def test_engines_of_a_set_number_of_threads_follow_nobody(
    built_pair: BuildPair, tmp_path: Path
) -> None:
    engines = built_pair().target_engine.parent
    shutil.copytree(engines, tmp_path / "engines")
    given = {"threads": None}, {"threads": 2}, {"threads": None, "device": "cuda"}
    follow = []
    for fields in given:
        for role in ("target", "drafter"):
            described = read_info(engines / role, "onnxruntime")
            write_info(tmp_path / "engines" / role, replace(described, **fields))
        follow.append(follows_cores(tmp_path))
    assert follow == [True, False, False]
    assert not follows_cores(tmp_path / "bundle")  # has no engine of ours

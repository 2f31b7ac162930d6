"""`dflash-trt bench matrix`, killed at ten random moments and started again: the same cells."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from pycode import PYCODE

from dflash_trt.bench import MatrixRun, read_run

pytestmark = pytest.mark.soak
CONFIG = PYCODE.parents[1] / "build_configs" / "pycode.yaml"
WHOLE, GONE = 900, 60  # seconds in which a run ends, and what a killed one left running is gone
KILLS, LONGEST = 10, 14.0  # seconds that a run gets at most before it is killed
RUN = "import sys; from dflash_trt.cli.main import main; sys.exit(main())"


def start(output: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [
            *(sys.executable, "-c", RUN, "bench", "matrix", str(CONFIG), "--output", str(output)),
            *("--concurrency", "1,2,4", "--requests", "4", "--max-tokens", "32"),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def finished(output: Path) -> bool:
    """Whether it ends with 0; on a busy machine an engine may die, which is tried again."""
    return any(start(output).wait(WHOLE) == 0 for _ in range(3))


def cells(output: Path) -> dict[str, bytes]:
    """Those that are done."""
    files = {file.name: file.read_bytes() for file in (output / "cells").glob("*.json")}
    return {name: text for name, text in files.items() if json.loads(text)["error"] is None}


def test_the_same_cells_after_ten_kills(tmp_path: Path) -> None:
    dice = random.Random(int(os.environ.get("DFLASH_TRT_SEED", "0")))
    undisturbed, killed = tmp_path / "a", tmp_path / "b"
    assert finished(undisturbed)
    seen, left = dict[str, bytes](), KILLS
    moments = []
    for round_ in range(4 * KILLS):
        if left == 0:
            break
        if len(seen) == len(cells(undisturbed)):  # done before all kills: begin again
            killed, seen = tmp_path / f"b{round_}", {}
        process = start(killed)
        with suppress(subprocess.TimeoutExpired):
            process.wait(dice.uniform(0.5, LONGEST))
        if process.poll() is None:
            process.kill()
            process.wait(10)
            left -= 1
        now = cells(killed)
        moments.append(len(now))
        assert now.items() >= seen.items()  # a cell that is done is not done again
        seen = now
    assert left == 0
    assert finished(killed)
    found = cells(killed)
    assert found.items() >= seen.items()
    assert found.keys() == cells(undisturbed).keys()
    runs = [read_run(output / "matrix.json") for output in (undisturbed, killed)]
    answers = []
    for run in runs:
        assert isinstance(run, MatrixRun)
        assert run.complete
        assert not [cell for cell in run.cells if cell.error]
        levels = [(str(cell), cell.level) for cell in run.cells]
        answers.append([(name, x.tokens, x.prompt_tokens) for name, x in levels if x])
    assert answers[0] == answers[1]
    print("cells after each kill:", moments)
    deadline = time.monotonic() + GONE  # the reapers'
    while left_behind := subprocess.run(
        ["pgrep", "-fa", str(tmp_path)], capture_output=True, text=True
    ).stdout:
        assert time.monotonic() < deadline, left_behind
        time.sleep(1)

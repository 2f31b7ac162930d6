"""`dflash-trt bench matrix`, killed at ten random moments and started again: the same loads."""

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

pytestmark = pytest.mark.soak
CONFIG = PYCODE.parents[1] / "build_configs" / "pycode.yaml"
AIPERF = Path(__file__).parents[1] / "fakes" / "aiperf.py"
WHOLE, GONE = 900, 60  # seconds in which a run ends, and what a killed one left running is gone
KILLS, LONGEST = 10, 14.0  # seconds that a run gets at most before it is killed
RUN = "import sys; from dflash_trt.cli.main import main; sys.exit(main())"


def start(output: Path) -> subprocess.Popen[bytes]:
    path = f"{output.parent / 'bin'}:{os.environ['PATH']}"
    return subprocess.Popen(
        [
            *(sys.executable, "-c", RUN, "bench", "matrix", str(CONFIG), "--output", str(output)),
            *("--concurrency", "1,2,4", "--requests", "4", "--max-tokens", "32"),
        ],
        env=os.environ | {"PATH": path},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def write_aiperf(folder: Path) -> None:
    """The stand-in, as a program."""
    folder.mkdir()
    (folder / "aiperf").write_text(f'#!/bin/sh\nexec {sys.executable} {AIPERF} "$@"\n')
    (folder / "aiperf").chmod(0o755)


def finished(output: Path) -> bool:
    """Whether it ends with 0; on a busy machine an engine may die, which is tried again."""
    return any(start(output).wait(WHOLE) == 0 for _ in range(3))


def loads(output: Path) -> dict[str, bytes]:
    """Those that are done."""
    files = (output / "loads").glob("*/load.json")
    return {file.parent.name: file.read_bytes() for file in files if file.parent.suffix != ".part"}


def test_the_same_loads_after_ten_kills(tmp_path: Path) -> None:
    dice = random.Random(int(os.environ.get("DFLASH_TRT_SEED", "0")))
    undisturbed, killed = tmp_path / "a", tmp_path / "b"
    write_aiperf(tmp_path / "bin")
    assert finished(undisturbed)
    seen, left = dict[str, bytes](), KILLS
    moments = []
    for round_ in range(4 * KILLS):
        if left == 0:
            break
        if len(seen) == len(loads(undisturbed)):  # done before all kills: begin again
            killed, seen = tmp_path / f"b{round_}", {}
        process = start(killed)
        with suppress(subprocess.TimeoutExpired):
            process.wait(dice.uniform(0.5, LONGEST))
        if process.poll() is None:
            process.kill()
            process.wait(10)
            left -= 1
        now = loads(killed)
        moments.append(len(now))
        assert now.items() >= seen.items()  # a load that is done is not done again
        seen = now
    assert left == 0
    assert finished(killed)
    found = loads(killed)
    assert found.items() >= seen.items()
    assert found.keys() == loads(undisturbed).keys()
    for output in (undisturbed, killed):
        listed = json.loads((output / "matrix.json").read_text())
        assert len(listed) == 6
        assert not [load for load in listed if load["error"]]
    print("loads after each kill:", moments)
    deadline = time.monotonic() + GONE
    while left_behind := subprocess.run(
        ["pgrep", "-fa", str(tmp_path)], capture_output=True, text=True
    ).stdout:
        assert time.monotonic() < deadline, left_behind
        time.sleep(1)

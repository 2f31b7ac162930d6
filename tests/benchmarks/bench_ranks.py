"""A step of the demo target, inflated, on one rank of one and of two threads and on two ranks.

    python -m pytest tests/benchmarks/bench_ranks.py -o addopts= -s

Each setting has a process of its own; they step in turns, so that whatever else the machine does
meets all; what counts is the median of the ratios.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import demo_pair
import numpy as np
from builds import build_engines
from pycode import PYCODE

from dflash_trt.engines.onnxruntime import Engine

SETTINGS = {"1 rank, 1 thread": (1, 1), "1 rank, 2 threads": (1, 2), "2 ranks, 1 thread": (2, 1)}
TURNS, STEPS = 15, 4
CONTEXT = 256  # positions in the cache


def work(directory: Path) -> None:
    """A setting's process: for each width that it reads, the seconds of some steps."""
    engine = Engine(directory)
    print("ready", flush=True)
    for line in sys.stdin:
        width = int(line)
        step = engine.step(0, 1, width, CONTEXT + width, width)
        positions = CONTEXT + np.arange(width)
        step.inputs["positions"][:] = positions
        step.inputs["write_index"][:] = CONTEXT
        step.inputs["mask"][:] = np.arange(CONTEXT + width) <= positions[:, None]
        step.inputs["head_rows"][:] = np.arange(width)
        step.run()
        start = time.perf_counter()
        for _ in range(STEPS):
            step.run()
        print(time.perf_counter() - start, flush=True)


def test_ranks(tmp_path: Path) -> None:
    examples = PYCODE.parent
    inflate = [sys.executable, examples / "inflate.py", "60m", tmp_path / "pair"]
    subprocess.run([*inflate, "--pair", PYCODE], check=True, timeout=300)
    target, drafter = (tmp_path / "pair" / role for role in ("target", "drafter"))
    with ExitStack() as stack:
        workers = {}
        for name, (ranks, threads) in SETTINGS.items():
            directory = tmp_path / name
            sizes = {"slots": 1, "max_seq_len": demo_pair.MAX_SEQ_LEN, "threads": threads}
            build_engines(target, drafter, directory, **sizes, ranks=ranks)
            worker = subprocess.Popen(
                [sys.executable, __file__, directory / "target"],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},  # ours, with tests/lib
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(worker)
            stack.callback(worker.kill)
            assert worker.stdout is not None
            assert worker.stdout.readline() == "ready\n"
            workers[name] = worker
        for width in (1, 16):
            times: dict[str, list[float]] = {name: [] for name in workers}
            for turn in range(TURNS + 1):
                for name, worker in workers.items():
                    assert worker.stdin is not None
                    assert worker.stdout is not None
                    print(width, file=worker.stdin, flush=True)
                    seconds = float(worker.stdout.readline())
                    if turn:  # the first one warms up
                        times[name].append(1e3 * seconds / STEPS)
            first = next(iter(times.values()))
            lines = [f"{name}: {demo_pair.spread(found, ' ms')}" for name, found in times.items()]
            for name, found in list(times.items())[1:]:
                ratios = [x / y for x, y in zip(found, first, strict=True)]
                lines.append(f"{name} / first: {demo_pair.spread(ratios)}")
            demo_pair.show(f"Step of {width} tokens, target inflated to 60m", lines)


if __name__ == "__main__":
    work(Path(sys.argv[1]))

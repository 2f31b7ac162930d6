"""How many threads are best where others work: the table "Threads" of docs/benchmarks.md.

    python scripts/threads_table.py BUILD [--turns 5] [--seconds 4]

Plain steps of the build's target by an engine of one thread, of two and so on up to the cores,
while so many other programs compute, in turns and in another order each time. An engine has a
process of its own, since ONNX Runtime sizes its threads once a process.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from random import Random
from statistics import median

from bench_table import PAGE, fill
from engines_table import CONTEXT, step
from peers import worker

from dflash_trt.bench import Table
from dflash_trt.engines.onnxruntime import Engine, use_one_pool
from dflash_trt.machine import usable_cores, versions

DICE = Random(0)
BUSY = [sys.executable, "-c", "while True: sum(range(10**6))"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=Path)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each in a turn")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)  # threads of a worker
    asked = parser.parse_args()
    if asked.serve:
        work(asked.build, asked.serve)
        return
    counts = range(1, usable_cores() + 1)
    others = range(usable_cores() + 2)
    cells = [*itertools.product(others, counts)]
    rates = defaultdict[tuple[int, int], list[float]](list)
    with ExitStack() as stack:
        line = [sys.executable, __file__, str(asked.build), "--serve"]
        engines = {n: stack.enter_context(worker([*line, str(n)])) for n in counts}
        for _ in range(asked.turns):
            for busy, n in DICE.sample(cells, len(cells)):
                programs = [subprocess.Popen(BUSY) for _ in range(busy)]
                try:
                    rates[busy, n].append(engines[n](asked.seconds))
                finally:
                    for each in programs:
                        each.kill()
                        each.wait()
    rows = [
        {"other programs": str(busy)}
        | {f"threads: {n}": f"{median(rates[busy, n]):.1f}" for n in counts}
        for busy in others
    ]
    note = f"Plain steps a second of one stream, medians of {asked.turns} turns."
    fill(PAGE, Path(__file__).name, versions(), Table("Threads", note, rows))


def work(build: Path, threads: int) -> None:
    """Answers a line of [seconds] by steps a second."""
    use_one_pool(threads)
    engine = Engine(build / "engines" / "target")
    for line in sys.stdin:
        (seconds,) = json.loads(line)
        start, steps = time.perf_counter(), 0
        while time.perf_counter() < start + seconds:
            step(engine, 1, 1, CONTEXT, 1)
            steps += 1
        print(json.dumps(steps / (time.perf_counter() - start)), flush=True)


if __name__ == "__main__":
    main()

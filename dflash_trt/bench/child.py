"""A benchmark in a process of its own: threads are set once a process, and memory is its own."""

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from dflash_trt.bench.engine import Plan, measure_engine
from dflash_trt.bench.results import Cell, peak_memory
from dflash_trt.errors import BenchError, DflashError

STOPPED = 10.0  # seconds that an interrupted process has to end


def measure_with_threads(
    engines: Path, threads: int, plan: Plan, progress: Callable[[int, int], None], done: list[Cell]
) -> int:
    """Append the cells to `done` as they come; returns the process's peak memory in bytes.

    Raises what the process raised if it is ours, else BenchError.
    """
    context = multiprocessing.get_context("spawn")
    ours, its = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(its, engines, threads, plan), daemon=True)
    process.start()
    its.close()
    try:
        while True:
            kind, *news = ours.recv()
            if kind == "progress":
                progress(*news)
            elif kind == "cell":
                done.append(news[0])
            elif kind == "error":
                raise news[0]
            else:
                return int(news[0])
    except EOFError:
        process.join(STOPPED)
        raise BenchError(
            f"the benchmark's process ended by itself (exit code {process.exitcode})",
            "Look for what it said above; -9 is a lack of memory: try a smaller --batch",
        ) from None
    finally:
        process.terminate()
        process.join(STOPPED)


def _run(say: Connection, engines: Path, threads: int, plan: Plan) -> None:
    from dflash_trt.engines.onnxruntime import use_one_pool  # noqa: PLC0415

    use_one_pool(threads)
    try:
        measure_engine(
            engines,
            threads,
            plan,
            lambda passes, total: say.send(("progress", passes, total)),
            lambda cell: say.send(("cell", cell)),
        )
    except DflashError as error:
        say.send(("error", error))
    except KeyboardInterrupt:
        return
    else:
        say.send(("done", peak_memory()))

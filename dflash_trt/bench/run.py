"""Benchmark a build: a process for each number of threads, which are set once in a process."""

import multiprocessing
import resource
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from dflash_trt.bench.engine import Plan, measure_engine
from dflash_trt.bench.results import Cell, Run
from dflash_trt.build import read_manifest
from dflash_trt.errors import BenchError, DflashError, RequestError

STOPPED = 10.0  # seconds that an interrupted process has to end


def run_engine(
    directory: Path,
    plan: Plan,
    threads: tuple[int, ...],
    options: Mapping[str, Any],
    report: Callable[[str, int, int], None],
) -> Run:
    """Measure `plan` with each number of threads; an interrupt ends it with what there is."""
    manifest = read_manifest(directory)
    if "drafter" not in manifest:
        raise RequestError(
            f"{directory} has no drafter, beside which methods are compared",
            "Build it with speculation.method dflash, or run `dflash-trt bench matrix`",
        )
    cells: list[Cell] = []
    memory, complete = 0, True
    for count in threads:
        step = "passes" if len(threads) == 1 else f"passes, {count} threads"

        def progress(done: int, total: int, step: str = step) -> None:
            report(step, done, total)

        try:
            peak = measure_with_threads(directory / "engines", count, plan, progress, cells)
            memory = max(memory, peak)
        except KeyboardInterrupt:
            complete = False
            break
    return Run(
        name=manifest["name"],
        target=_describe(manifest["target"]),
        drafter=_describe(manifest["drafter"]),
        options=options,
        cells=cells,
        peak_memory=memory,
        complete=complete,
        hub={role: source["id"] for role, source in manifest.get("hub", {}).items()},
    )


def measure_with_threads(
    engines: Path, threads: int, plan: Plan, progress: Callable[[int, int], None], done: list[Cell]
) -> int:
    """Append the cells to `done` as they come; returns the process's peak memory in bytes.

    Raises what the process raised if it is ours, otherwise BenchError.
    """
    context = multiprocessing.get_context("spawn")
    ours, its = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(its, engines, threads, plan), daemon=True)
    process.start()
    its.close()
    try:
        while True:
            match ours.recv():
                case (int(passes), int(total)):
                    progress(passes, total)
                case Cell() as cell:
                    done.append(cell)
                case DflashError() as error:
                    raise error
                case int(peak):
                    return peak
    except EOFError:
        process.join(STOPPED)
        raise BenchError(
            f"the benchmark's process ended by itself (exit code {process.exitcode})",
            "Look for what it said above; -9 is a lack of memory: try a smaller --batch",
        ) from None
    finally:
        process.terminate()
        process.join(STOPPED)


def _work(out: Connection, engines: Path, threads: int, plan: Plan) -> None:
    from dflash_trt.engines.onnxruntime import use_one_pool  # noqa: PLC0415

    use_one_pool(threads)
    try:
        measure_engine(engines, threads, plan, lambda *passes: out.send(passes), out.send)
    except DflashError as error:
        out.send(error)
    except KeyboardInterrupt:
        return
    else:
        out.send(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def _describe(spec: Mapping[str, Any]) -> str:
    """A model in a few words, from its spec in a manifest."""
    kind = spec.get("model_type") or f"DFlash drafter, block {spec['block_size']}"
    return (
        f"{kind}: {len(spec['layers'])} layers, hidden size {spec['hidden_size']}, "
        f"vocabulary {spec['vocab_size']}"
    )

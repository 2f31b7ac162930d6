"""A benchmark of a built directory, from its options to its results."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_trt.bench.child import measure_with_threads
from dflash_trt.bench.engine import Plan
from dflash_trt.bench.results import Cell, Run
from dflash_trt.build.manifest import read_manifest
from dflash_trt.checkpoints import Report


def run_engine(
    directory: Path,
    plan: Plan,
    threads: tuple[int, ...],
    options: Mapping[str, Any],
    report: Report,
) -> Run:
    """Measure `plan` with each number of threads; interrupted, what there is comes back."""
    manifest = read_manifest(directory)
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
        target=describe(manifest["target"]),
        drafter=describe(manifest["drafter"]),
        options=options,
        cells=cells,
        peak_memory=memory,
        complete=complete,
        hub={role: source["id"] for role, source in manifest.get("hub", {}).items()},
    )


def describe(spec: Mapping[str, Any]) -> str:
    """A model in a few words, from its spec in a manifest."""
    kind = spec.get("model_type") or f"DFlash drafter, block {spec['block_size']}"
    return (
        f"{kind}: {len(spec['layers'])} layers, hidden size {spec['hidden_size']}, "
        f"vocabulary {spec['vocab_size']}"
    )

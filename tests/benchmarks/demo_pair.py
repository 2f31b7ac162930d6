"""What the benchmarks share: the demo pair's engines, its prompts, and a line about the machine."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from statistics import median

from builds import build_engines
from pycode import PYCODE

from dflash_trt.machine import machine as this_machine

THREADS = 2
MAX_SEQ_LEN = 512


def machine() -> str:
    """CPU model, cores and load: a timing means nothing without them."""
    found = this_machine()
    load = ", ".join(f"{value:.2f}" for value in found["load_average"])
    return f"{found['cpu']}, {found['cores']} cores, {THREADS} threads used, load average {load}"


@cache
def engines(slots: int = 4) -> Path:
    """A fresh build of the demo pair; holds target/ and drafter/."""
    directory = Path(tempfile.mkdtemp(prefix="dflash-bench-"))
    sizes = {"slots": slots, "max_seq_len": MAX_SEQ_LEN, "threads": THREADS}
    build_engines(PYCODE / "target", PYCODE / "drafter", directory, **sizes)
    return directory


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def show(title: str, lines: Sequence[str]) -> None:
    print("\n".join([f"\n{title}", f"  on {machine()}", *(f"  {line}" for line in lines)]))


def hold(what: str, ratios: Sequence[float], *, least: float = 0.0, most: float = 1e9) -> None:
    """AssertionError when the median is beyond its bar."""
    middle = median(ratios)
    assert least <= middle <= most, f"{what}: {middle:.3f} is not {least} to {most}"


def spread(values: Sequence[float], unit: str = "") -> str:
    """Median with the smallest and the largest."""
    return f"{median(values):.3g}{unit} ({min(values):.3g} to {max(values):.3g})"

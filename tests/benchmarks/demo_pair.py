"""What the benchmarks share: the demo pair's engines, its prompts, and a line about the machine."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from statistics import median

from tokenizers import Tokenizer

from dflash_trt.build.engines import build_drafter, build_target
from dflash_trt.checkpoints import load_drafter, load_target
from dflash_trt.machine import machine as this_machine

PYCODE = Path(__file__).parents[2] / "examples" / "pycode"
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
    target, drafter = load_target(PYCODE / "target"), load_drafter(PYCODE / "drafter")
    directory = Path(tempfile.mkdtemp(prefix="dflash-bench-"))
    (directory / "target").mkdir()
    (directory / "drafter").mkdir()

    def silent(name: str) -> None:
        pass

    build_target(
        target,
        drafter.spec,
        directory / "target",
        slots=slots,
        max_seq_len=MAX_SEQ_LEN,
        threads=THREADS,
        progress=silent,
    )
    build_drafter(
        drafter,
        target,
        directory / "drafter",
        slots=slots,
        max_seq_len=MAX_SEQ_LEN,
        threads=THREADS,
        progress=silent,
    )
    return directory


def prompts() -> list[list[int]]:
    """The 40 held-out prompts, as token ids."""
    tokenizer = Tokenizer.from_file(str(PYCODE / "target" / "tokenizer.json"))
    lines = (PYCODE / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    entries = [json.loads(line) for line in lines]
    return [e["ids"] if "ids" in e else tokenizer.encode(e["text"]).ids for e in entries]


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

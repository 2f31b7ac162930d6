"""How fast a build's files are held against their manifest, which `serve` waits for.

    python -m pytest tests/benchmarks/bench_check.py -o addopts= -s

One file on each side of the size from which digests are BLAKE3; warm: it lies in the page cache.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from dflash_trt.digests import LARGE, entry

TURNS = 3


@pytest.mark.parametrize("size", [LARGE - 4096, 4 * LARGE])
def test_rate(tmp_path: Path, size: int) -> None:
    file = tmp_path / "file"
    with file.open("wb") as stream:
        for _ in range(0, size, 1 << 22):
            stream.write(os.urandom(min(1 << 22, size - stream.tell())))
        os.fsync(stream.fileno())
    rates = {}
    for warm in (False, True):
        if not warm:
            with file.open("rb") as stream:
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        best = 0.0
        for _ in range(TURNS if warm else 1):
            started = time.perf_counter()
            kind = next(iter(entry(file)))
            best = max(best, size / (time.perf_counter() - started) / 1e9)
        rates["warm" if warm else "cold"] = best
    print(f"\n{kind}: {rates['cold']:.2f} GB/s from the disk, {rates['warm']:.2f} warm")
    assert min(rates.values()) > 0.05

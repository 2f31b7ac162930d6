"""DFlash against the target alone in the same engine: each draft length, and the adaptive policy.

    python -m pytest tests/benchmarks/bench_speedup.py -o addopts= -s

What `dflash-trt verify` reports: every prompt is decoded both ways, one after the other.
Bar of the adaptive policy: 1.25.
"""

from __future__ import annotations

import demo_pair
from pycode import PYCODE, prompt_ids
from pytest_benchmark.fixture import BenchmarkFixture

from dflash_trt.checkpoints import load_drafter
from dflash_trt.config import Speculation
from dflash_trt.decoding import check_lossless

NEW_TOKENS = 128


def test_speedup(benchmark: BenchmarkFixture) -> None:
    directory, prompts = demo_pair.engines(), prompt_ids()
    longest = load_drafter(PYCODE / "drafter").spec.block_size - 1
    fixed = [Speculation(draft_tokens=drafts) for drafts in range(1, longest + 1)]
    lines: list[str] = []
    adaptive: list[float] = []

    def run() -> None:
        for speculation in (Speculation(), *fixed, Speculation()):
            report = check_lossless(directory, prompts, NEW_TOKENS, speculation, lambda done: None)
            adaptive.extend([report.speedup] * (speculation.policy == "adaptive"))
            assert report.identical == report.total
            name = str(speculation.draft_tokens or speculation.policy)
            lines.append(
                f"draft tokens {name:>8}: speedup {report.speedup:.2f}, tau {report.tau:.3f}, "
                f"{report.dflash_tokens_per_s:.0f} against {report.plain_tokens_per_s:.0f} "
                f"tokens/s, {report.identical}/{report.total} identical"
            )

    benchmark.pedantic(run, rounds=1, iterations=1)
    benchmark.extra_info.update(machine=demo_pair.machine(), lines=lines)
    demo_pair.show("DFlash against plain decoding (bar: 1.25)", lines)
    demo_pair.hold("speedup of the adaptive policy", adaptive, least=1.25)

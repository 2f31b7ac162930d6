"""What the front adds to a request and a round: rendering a chat, counting for the metrics.

python -m pytest tests/benchmarks/bench_front.py -o addopts= -s
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import pytest
from triton_metrics import Triton

from dflash_trt.chat.templates import Template
from dflash_trt.serving.front.metrics import Metrics

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
PHASES = {"verify": 0.004, "draft": 0.002, "hop": 0.001, "scheduler": 0.0005}


def median_us(call: Callable[[], object], times: int = 500) -> float:
    found = []
    for _ in range(times):
        started = time.perf_counter()
        call()
        found.append(time.perf_counter() - started)
    return statistics.median(found) * 1e6


@pytest.mark.parametrize(("messages", "characters"), [(2, 30), (200, 300)])
def test_rendering_a_chat(messages: int, characters: int) -> None:
    chat = [{"role": "user", "content": "x" * characters}] * messages
    template = Template(TEMPLATE)
    took = median_us(lambda: template(messages=chat))
    print(f"\n{messages} messages of {characters} characters: {took / 1000:.2f} ms")
    assert took < 50_000


def test_counting_a_round() -> None:
    metrics = Metrics(Triton(), 7)

    def count() -> None:
        metrics.round(**PHASES, sequences=[(7, 7, 3)] * 8, choices=["chain"] * 8)
        for _ in range(8):
            metrics.tokens(4, 0.008)

    took = median_us(count)
    metrics.close()
    print(f"\na round of 8 sequences: {took:.0f} us")
    assert took < 5_000

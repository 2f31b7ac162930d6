"""What scheduler, sampling and binding add to the two engine calls of a round.

    python -m pytest tests/benchmarks/bench_overhead.py -o addopts= -s

Bars: at most 10 %, and 25 % when sampling.
The two engine calls are the two `run_with_iobinding` calls: filling the bound
inputs counts as overhead, and so does everything else between two steps of the scheduler.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import demo_pair
import onnxruntime as ort
import pytest
from pycode import prompt_ids
from pytest_benchmark.fixture import BenchmarkFixture

from dflash_trt.decoding import Request, SamplingParams, Scheduler, in_process
from dflash_trt.decoding.speculation import Fixed
from dflash_trt.engines.onnxruntime import Engine

NEW_TOKENS = 128
BARS = {0.0: 0.1, 0.8: 0.25}  # by temperature


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_overhead(
    slots: int, temperature: float, benchmark: BenchmarkFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = demo_pair.engines()
    target, drafter = Engine(directory / "target"), Engine(directory / "drafter")
    in_engines = 0.0
    session_run = ort.InferenceSession.run_with_iobinding

    def timed_run(self: ort.InferenceSession, *args: Any, **kwargs: Any) -> Any:
        nonlocal in_engines
        start = time.perf_counter()
        result = session_run(self, *args, **kwargs)
        in_engines += time.perf_counter() - start
        return result

    monkeypatch.setattr(ort.InferenceSession, "run_with_iobinding", timed_run)
    block_size = drafter.info.block_size
    rounds: list[tuple[float, float]] = []

    def decode(prompts: list[list[int]]) -> None:
        nonlocal in_engines
        scheduler = Scheduler(
            in_process(target, drafter),
            slots=slots,
            max_seq_len=demo_pair.MAX_SEQ_LEN,
            prefill_chunk=demo_pair.MAX_SEQ_LEN,
            policy=Fixed(block_size - 1),
        )
        sequences = [
            scheduler.submit(Request(prompt, NEW_TOKENS, SamplingParams(temperature, seed=seed)))
            for seed, prompt in enumerate(prompts)
        ]
        while scheduler.busy:
            before = sum(s.rounds for s in sequences)
            in_engines = 0.0
            total = demo_pair.seconds(scheduler.step)
            if sum(s.rounds for s in sequences) > before:  # a round, not a prompt
                rounds.append((total, in_engines))

    prompts = prompt_ids()
    decode(prompts[:8])  # warm up: shapes are bound the first time they occur
    rounds.clear()
    benchmark.pedantic(decode, args=(prompts[8:24],), rounds=3, iterations=1)
    engine_ms = 1e3 * median(engines for _, engines in rounds)
    added_us = 1e6 * median(total - engines for total, engines in rounds)
    overheads = [(total - engines) / engines for total, engines in rounds]
    benchmark.extra_info.update(
        engine_ms=engine_ms,
        added_us=added_us,
        overhead=median(overheads),
        machine=demo_pair.machine(),
    )
    demo_pair.show(
        f"Overhead of a round, {slots} slots, temperature {temperature} (bar: {BARS[temperature]})",
        [
            f"two engine calls: {engine_ms:.3f} ms (median of {len(rounds)} rounds)",
            f"everything else:  {added_us:.0f} us",
            f"overhead:         {median(overheads):.3f}, in all "
            f"{sum(t for t, _ in rounds) / sum(e for _, e in rounds) - 1:.3f}",
        ],
    )
    demo_pair.hold("overhead", overheads, most=BARS[temperature])

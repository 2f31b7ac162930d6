"""Tokens per second through the real server, in both modes, against the bare engine.

    python -m pytest tests/benchmarks/bench_serving.py -o addopts= -s

The runs take turns, and the ratios are medians over the pairs of a turn. Bars: with 8 streams of
the demo pair `in_process` keeps 90 % of the bare engine's tokens/s and `ensemble` 70 %; with a
target whose round takes 50 ms or more, `ensemble` keeps 95 %; from 1 to 32 streams throughput rises
and then stays within 10 % of its best. All with the same fixed number of draft tokens.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import demo_pair
import pytest
from builds import config_of, quiet
from pairs import make_pair
from pycode import PYCODE, prompt_texts
from pytest_benchmark.fixture import BenchmarkFixture

from dflash_trt.build.run import build
from dflash_trt.serving.ports import Ports
from dflash_trt.serving.server.run import running_server

DRAFT_TOKENS, NEW_TOKENS, TURNS = 3, 128, 5
MODES = ("in_process", "ensemble")
HERE = Path(__file__).parent


def built(pair: Path, mode: str, slots: int) -> Path:
    directory = Path(tempfile.mkdtemp(prefix="dflash-bench-")) / mode
    config = config_of(
        pair,
        engine={"threads": demo_pair.THREADS},
        speculation={"draft_tokens": DRAFT_TOKENS},
        serving={"mode": mode, "slots": slots, "max_seq_len": 512, "max_queue": 256},
    )
    build(config, directory, quiet)
    return directory


def bare(directory: Path, prompts: Sequence[str], streams: int, new_tokens: int) -> float:
    """Tokens per second of the scheduler on the engines, in a process of its own."""
    return _in_process(["bare", str(directory), str(streams), str(new_tokens)], prompts)


def served(ports: Ports, prompts: Sequence[str], streams: int, new_tokens: int) -> float:
    """Tokens per second of so many clients that stream one request after another."""
    return _in_process(["client", str(ports.grpc), str(streams), str(new_tokens)], prompts)


def _in_process(arguments: list[str], prompts: Sequence[str]) -> float:
    result = subprocess.run(
        [sys.executable, str(HERE / "serving_load.py"), *arguments],
        input=json.dumps(list(prompts)),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return float(result.stdout)


def compare(
    pair: Path, prompts: Sequence[str], streams: int, new_tokens: int
) -> dict[str, list[float]]:
    """Tokens per second of `bare` and of each mode, TURNS times in turns."""
    rates: dict[str, list[float]] = {"bare": [], **{mode: [] for mode in MODES}}
    directories = {mode: built(pair, mode, streams) for mode in MODES}
    with (
        running_server(directories["in_process"]) as one,
        running_server(directories["ensemble"]) as two,
    ):
        ports = dict(zip(MODES, (one, two), strict=True))
        for mode in MODES:  # shapes are bound the first time they occur
            served(ports[mode], prompts[: 2 * streams], streams, new_tokens)
        for _ in range(TURNS):
            for mode in MODES:
                rates[mode].append(served(ports[mode], prompts, streams, new_tokens))
            rates["bare"].append(bare(directories["in_process"], prompts, streams, new_tokens))
            time.sleep(1)
    return rates


def report(
    title: str, rates: dict[str, list[float]], benchmark: BenchmarkFixture, bars: dict[str, float]
) -> None:
    lines = [f"bare engine: {demo_pair.spread(rates['bare'], ' tokens/s')}"]
    for mode in MODES:
        ratios = [a / b for a, b in zip(rates[mode], rates["bare"], strict=True)]
        lines.append(
            f"{mode:>11}: {demo_pair.spread(rates[mode], ' tokens/s')}, "
            f"of the bare engine's {demo_pair.spread(ratios)}"
        )
    benchmark.extra_info.update(machine=demo_pair.machine(), lines=lines, rates=rates)
    demo_pair.show(f"{title} (bars: {bars})", lines)
    for mode, bar in bars.items():
        ratios = [a / b for a, b in zip(rates[mode], rates["bare"], strict=True)]
        demo_pair.hold(f"{title}, {mode}", ratios, least=bar)


def demo_prompts(count: int) -> list[str]:
    texts = prompt_texts()
    return [texts[i % len(texts)] for i in range(count)]


def test_demo_pair_with_eight_streams(benchmark: BenchmarkFixture) -> None:
    def run() -> dict[str, list[float]]:
        return compare(PYCODE, demo_prompts(64), 8, NEW_TOKENS)

    rates = benchmark.pedantic(run, rounds=1, iterations=1)
    bars = {"in_process": 0.9, "ensemble": 0.7}
    report("Served demo pair, 8 streams", rates, benchmark, bars)


def test_a_target_with_long_rounds(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    """A random Llama whose round of 8 sequences takes 50 ms or more on two cores."""
    make_pair(
        tmp_path,
        family="llama",
        hidden=1024,
        heads=16,
        kv_heads=8,
        head_dim=64,
        intermediate=4096,
        layers=8,
        taps=(1, 3, 5),
        vocab=1024,
    )

    def run() -> dict[str, list[float]]:
        return compare(tmp_path, ["abcdefgh" * 4] * 16, 8, 24)

    rates = benchmark.pedantic(run, rounds=1, iterations=1)
    report("Served target of long rounds, 8 streams", rates, benchmark, {"ensemble": 0.95})


@pytest.mark.parametrize("mode", MODES)
def test_streams_from_1_to_32(mode: str, benchmark: BenchmarkFixture) -> None:
    counts = (1, 2, 4, 8, 16, 32)
    rates: dict[int, list[float]] = {count: [] for count in counts}

    def run() -> None:
        with running_server(built(PYCODE, mode, 32)) as ports:
            served(ports, demo_prompts(64), 32, NEW_TOKENS)
            for _ in range(3):
                for count in counts:
                    prompts = demo_prompts(max(16, 3 * count))
                    rates[count].append(served(ports, prompts, count, NEW_TOKENS))

    benchmark.pedantic(run, rounds=1, iterations=1)
    middle = {count: median(values) for count, values in rates.items()}
    lines = [
        f"{count:>2} streams: {demo_pair.spread(rates[count], ' tokens/s')}, "
        f"of the best {middle[count] / max(middle.values()):.2f}"
        for count in counts
    ]
    benchmark.extra_info.update(machine=demo_pair.machine(), lines=lines)
    demo_pair.show(f"Served demo pair, {mode}", lines)
    best = list(middle.values()).index(max(middle.values()))
    for count in counts[best:]:
        demo_pair.hold(
            f"{count} streams of the best", [middle[count] / max(middle.values())], least=0.9
        )

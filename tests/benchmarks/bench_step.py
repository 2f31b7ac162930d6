"""A plain step of the demo target against a `transformers` eager step, in one run.

    python -m pytest tests/benchmarks/bench_step.py -o addopts= -s

Bar: at most a third. Both decode the same prompt token by token with their caches, in turns of 16
steps, so that whatever else the machine does meets both; what counts is the median of the ratios.
"""

from __future__ import annotations

from statistics import median

import demo_pair
import torch
from pycode import PYCODE, prompt_ids
from pytest_benchmark.fixture import BenchmarkFixture
from transformers import AutoModelForCausalLM, DynamicCache

from dflash_trt.decoding import Request, Scheduler, in_process
from dflash_trt.decoding.speculation import Fixed
from dflash_trt.engines.onnxruntime import Engine

TURNS, STEPS = 24, 16


class Eager:
    """`transformers`, eager attention, one greedy step at a time."""

    def __init__(self, prompt: list[int]) -> None:
        torch.set_num_threads(demo_pair.THREADS)
        self._model = AutoModelForCausalLM.from_pretrained(
            PYCODE / "target", dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self._prompt = torch.tensor([prompt])
        self.restart()

    @torch.inference_mode()
    def restart(self) -> None:
        self._cache = DynamicCache(config=self._model.config)
        self._tokens = self._prompt
        self.steps(1)

    @torch.inference_mode()
    def steps(self, count: int) -> None:
        for _ in range(count):
            output = self._model(self._tokens, past_key_values=self._cache, use_cache=True)
            self._tokens = output.logits[:, -1:].argmax(-1)


class Ours:
    """The target alone in our engine, through the scheduler: everything a step costs."""

    def __init__(self, prompt: list[int]) -> None:
        self._prompt = prompt
        self._rounds = in_process(Engine(demo_pair.engines() / "target"), None)
        self.restart()

    def restart(self) -> None:
        self._scheduler = Scheduler(
            self._rounds,
            slots=1,
            max_seq_len=demo_pair.MAX_SEQ_LEN,
            prefill_chunk=demo_pair.MAX_SEQ_LEN,
            policy=Fixed(0),
        )
        self._scheduler.submit(Request(self._prompt, demo_pair.MAX_SEQ_LEN - len(self._prompt)))
        self.steps(1)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self._scheduler.step()


def test_step(benchmark: BenchmarkFixture) -> None:
    prompt = prompt_ids()[0]
    eager, ours = Eager(prompt), Ours(prompt)
    for warm_up in (eager, ours):
        warm_up.steps(STEPS)
        warm_up.restart()
    times: list[tuple[float, float]] = []

    def turns() -> None:
        for turn in range(TURNS):
            if turn % 8 == 0:  # context grows from the prompt's length by 128
                eager.restart()
                ours.restart()
            of_eager = demo_pair.seconds(lambda: eager.steps(STEPS))
            of_ours = demo_pair.seconds(lambda: ours.steps(STEPS))
            times.append((of_eager / STEPS, of_ours / STEPS))

    benchmark.pedantic(turns, rounds=3, iterations=1)
    ratios = [of_ours / of_eager for of_eager, of_ours in times]
    result = {
        "transformers_eager_step_ms": 1e3 * median(e for e, _ in times),
        "our_step_ms": 1e3 * median(o for _, o in times),
        "ratio": median(ratios),
    }
    benchmark.extra_info.update(result, machine=demo_pair.machine())
    demo_pair.show(
        "Plain step of the demo target (bar: ratio at most 0.333)",
        [
            f"transformers eager: {demo_pair.spread([1e3 * e for e, _ in times], ' ms')}",
            f"dflash-trt:         {demo_pair.spread([1e3 * o for _, o in times], ' ms')}",
            f"ratio:              {demo_pair.spread(ratios)}",
        ],
    )
    demo_pair.hold("our step of an eager one's time", ratios, most=1 / 3)

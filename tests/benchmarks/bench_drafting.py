"""What the details of drafting cost a round: rounds with them and without, in turns.

    DRAFTING_BUILD=build/smollm2 python -m pytest tests/benchmarks/bench_drafting.py -o addopts= -s

Without the variable it is the demo pair, whose rounds are so short that no bar holds for it. Two
slots of one engine decode the same text, one round each in turn, with all that the server does for
it up to the output tensors: without details twice, which is the noise, then with them. Bar: 2 %.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from statistics import median

import demo_pair
import pytest
from pycode import PYCODE, prompt_texts
from tokenizers import Tokenizer

from dflash_trt.checkpoints import load_tokenizer
from dflash_trt.decoding import Request, RunRound, SamplingParams, Scheduler, in_process
from dflash_trt.decoding.speculation import Fixed
from dflash_trt.engines import load_engine
from dflash_trt.serving.front.output_processor import OutputProcessor
from dflash_trt.serving.front.request_output import arrays

NEW_TOKENS, TEXTS, BAR = 96, int(os.environ.get("DRAFTING_TEXTS", "8")), 1.02


class Text:
    """A text being decoded in a slot of its own."""

    def __init__(
        self, rounds: RunRound, slot: int, tokenizer: Tokenizer, request: Request, drafts: int
    ) -> None:
        self._scheduler = Scheduler(
            rounds,
            slots=1,
            max_seq_len=len(request.prompt) + NEW_TOKENS,
            prefill_chunk=len(request.prompt),
            policy=Fixed(drafts),
            first_slot=slot,
        )
        self.sequence = self._scheduler.submit(request)
        self.told = 0
        self._processor = OutputProcessor(0, self.sequence, 0.0, tokenizer, (), "")
        self.step()

    def step(self) -> float:
        """Seconds of a step, and of giving out what is new."""
        start = time.perf_counter()
        self._scheduler.step()
        if (output := self._processor.output(final_only=False)) is not None:
            self.told += len(arrays(output).get("drafting_rounds", ()))
        return time.perf_counter() - start


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_details_of_drafting(temperature: float) -> None:
    build = os.environ.get("DRAFTING_BUILD")
    engines = Path(build) / "engines" if build else demo_pair.engines()
    tokenizer = load_tokenizer(Path(build) / "tokenizer" if build else PYCODE / "target")
    target, drafter = (load_engine(engines / role) for role in ("target", "drafter"))
    rounds, drafts = in_process(target, drafter), target.info.block_size - 1
    seconds: list[float] = []
    ratios: dict[bool, list[float]] = {False: [], True: []}
    for number, prompt in enumerate(prompt_texts()[: 1 + TEXTS]):
        for details in (False, True):
            texts = [
                Text(
                    rounds,
                    slot,
                    tokenizer,
                    Request(
                        tokenizer.encode(prompt).ids,
                        NEW_TOKENS,
                        SamplingParams(temperature, seed=number, include_drafting=asked),
                    ),
                    drafts,
                )
                for slot, asked in enumerate((False, details))
            ]
            took = [0.0, 0.0]
            turn = number
            while texts[0].sequence.finish_reason is None:
                turn += 1
                for slot in (0, 1) if turn % 2 else (1, 0):  # neither is always first
                    took[slot] = texts[slot].step()
                if number:  # the first text binds the shapes
                    seconds.append(took[0])
                    ratios[details].append(took[1] / took[0])
            assert texts[0].sequence.tokens == texts[1].sequence.tokens
            assert texts[1].told == details * (1 + texts[1].sequence.rounds)
    demo_pair.show(
        f"Rounds with the details of drafting, temperature {temperature} (bar: {BAR})",
        [
            f"a round without: {1000 * median(seconds):.2f} ms, up to {drafts} drafts",
            f"the same again:  {median(ratios[False]):.4f} of it (median of {len(ratios[False])})",
            f"with details:    {median(ratios[True]):.4f} of it (median of {len(ratios[True])})",
        ],
    )
    if build:
        demo_pair.hold("a round with details", ratios[True], most=BAR)

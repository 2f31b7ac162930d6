"""Logits are read where a rule needs them: on a GPU that copies them to the host."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dflash_trt.decoding import (
    Features,
    Request,
    Round,
    RoundSequence,
    SamplingParams,
    in_process,
    verify,
)
from dflash_trt.decoding.acceptance import Accepted, accept
from dflash_trt.decoding.logits_processor import LogitsProcessor
from dflash_trt.engines import Step
from dflash_trt.engines.onnxruntime import Engine
from dflash_trt.speculation import Fixed
from tests.support.built_pairs import BuildPair, BuiltPair
from tests.support.equality import run_all, scheduler_of

NEW_TOKENS, VOCAB = 20, 64
RULES = {
    "a temperature": SamplingParams(0.8, seed=1),
    "a penalty": SamplingParams(repetition_penalty=1.2),
    "log-probabilities": SamplingParams(logprobs=1),
    "those of the prompt": SamplingParams(logprobs=0, prompt_logprobs=True),
    "those of drafts": SamplingParams(include_drafting=True),
}


class Outputs(dict[str, Any]):
    reads = 0

    def __getitem__(self, name: str) -> Any:
        self.reads += name == "logits"
        return super().__getitem__(name)


class CountingEngine(Engine):
    """An engine that counts its steps, and which of them had their logits read, how often."""

    def __init__(self, built: BuiltPair) -> None:
        super().__init__(built.target_engine)
        self.outputs: list[Outputs] = []

    def step(self, *sizes: int, **context: int) -> Step:
        step = super().step(*sizes, **context)
        self.outputs.append(Outputs(step.outputs))
        return replace(step, outputs=self.outputs[-1])

    @property
    def reads(self) -> list[int]:
        return [outputs.reads for outputs in self.outputs]


@pytest.fixture
def built(built_pair: BuildPair) -> BuiltPair:
    return built_pair(family="llama", taps=(0, 2))


def decode(engine: CountingEngine, built: BuiltPair, *sampling: SamplingParams) -> None:
    """Decode prompts of two chunks with drafts, all sequences at once."""
    rounds = in_process(engine, Engine(built.drafter_engine))
    scheduler = scheduler_of(rounds, Fixed(7), prefill_chunk=10)
    requests = [
        Request(text[:14], NEW_TOKENS, params)
        for text, params in zip(built.texts, sampling, strict=False)
    ]
    sequences = run_all(scheduler, requests)
    assert all(len(sequence.tokens) == NEW_TOKENS for sequence in sequences)
    assert any(sequence.accepted for sequence in sequences)


def test_greedy_texts_without_rules_read_none(built: BuiltPair) -> None:
    engine = CountingEngine(built)
    decode(engine, built, *[SamplingParams()] * 4)
    assert len(engine.reads) > 8
    assert not any(engine.reads)


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_reads_them_once_a_round(rule: str, built: BuiltPair) -> None:
    """However many rows have one; greedy neighbors do not add to it."""
    engine = CountingEngine(built)
    decode(engine, built, RULES[rule], RULES[rule], SamplingParams())
    assert {*engine.reads} == {0, 1}


def test_a_round_without_rules_gives_none(built: BuiltPair) -> None:
    engine = CountingEngine(built)
    round = Round(0, [RoundSequence([3, 4], 2, 0, budget=9)], Features.DROP)
    (result,) = verify(engine, round).results
    assert (result.logprobs, result.draft_logprobs, result.failed) == (None, (), False)
    assert engine.reads == [0]


def test_a_grammar_reads_them_if_it_forbids_the_likeliest_token() -> None:
    logits = np.zeros((1, 2, VOCAB), np.float32)
    logits[0, :, [5, 40, 6]] = [[9.0], [8.0], [7.0]]
    reads = 0

    def read() -> np.ndarray[Any, np.dtype[np.float32]]:
        nonlocal reads
        reads += 1
        return logits

    def chosen(*allowed: int, drafts: tuple[int, ...] = ()) -> Accepted | None:
        mask = np.zeros(VOCAB, np.uint8)
        mask[list(allowed)] = 1
        bits = np.packbits(mask, bitorder="little").view(np.int32)
        processor = LogitsProcessor(SamplingParams(), 1, ())
        row = RoundSequence(
            [3, *drafts], 1, 8, 9, processor=processor, masks=[bits, None][: 1 + len(drafts)]
        )
        (accepted,) = accept([row], [[5, 5]], read)
        return accepted

    assert chosen(5, 6) == (0, 5)
    assert chosen(5, 40, drafts=(5,)) == (1, 5)
    assert reads == 0
    assert chosen(6, 40) == (0, 40)
    assert chosen(31, 63) is not None
    assert chosen() is None
    assert reads == 3

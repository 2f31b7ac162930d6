"""Penalties, forbidden words, least lengths and log-probabilities, against `transformers`."""

from typing import Any

import numpy as np
import pytest
import reference
import torch
from built_pairs import BuildPair, BuiltPair
from exact import run_all, scheduler_of
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from dflash_trt.decoding import Request, SamplingParams, SequenceState, in_process
from dflash_trt.decoding.logits_processor import LogitsProcessor, decode
from dflash_trt.decoding.speculation import Fixed
from dflash_trt.engines.onnxruntime import Engine

VOCAB, PROMPT, OUTPUT = 50, [3, 4, 3, 9], [7, 9, 7, 7]
STOP = (5, 6)


def ours(sampling: SamplingParams, logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    kept = LogitsProcessor(sampling, len(PROMPT), STOP).weights(logits, 8, PROMPT + OUTPUT)
    return kept / kept.sum()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("sampling", "processors"),
    [
        (SamplingParams(1.0, repetition_penalty=1.7), [RepetitionPenaltyLogitsProcessor(1.7)]),
        (SamplingParams(1.0, repetition_penalty=0.6), [RepetitionPenaltyLogitsProcessor(0.6)]),
        (SamplingParams(1.0, min_p=0.1), [MinPLogitsWarper(0.1)]),
        (
            SamplingParams(1.0, min_tokens=5),
            [MinNewTokensLengthLogitsProcessor(len(PROMPT), 5, list(STOP))],
        ),
        (
            SamplingParams(1.0, min_tokens=4),
            [MinNewTokensLengthLogitsProcessor(len(PROMPT), 4, list(STOP))],
        ),
        (
            SamplingParams(1.0, bad_words=((1,), (7, 2), (9, 8), (9, 7, 7, 11))),
            [NoBadWordsLogitsProcessor([[1], [7, 2], [9, 8], [9, 7, 7, 11]])],
        ),
    ],
    ids=["dearer", "cheaper", "min_p", "min_tokens", "enough_tokens", "bad_words"],
)
def test_rules_are_transformers(sampling: SamplingParams, processors: list[Any], seed: int) -> None:
    logits = np.random.default_rng(seed).normal(0, 2, VOCAB).astype(np.float32)
    theirs = LogitsProcessorList(processors)(
        torch.tensor([PROMPT + OUTPUT]), torch.from_numpy(logits.copy())[None]
    )
    expected = torch.softmax(theirs[0], -1).numpy()
    before = logits.copy()
    np.testing.assert_allclose(ours(sampling, logits), expected, atol=1e-6)
    assert (logits == before).all()


def test_penalties_of_the_output_alone() -> None:
    """OpenAI's definition: presence once, frequency by the count; the prompt does not count."""
    logits = np.random.default_rng(0).normal(0, 2, VOCAB).astype(np.float32)
    expected = logits.copy()
    expected[7] -= 0.5 + 3 * 0.25
    expected[9] -= 0.5 + 0.25
    expected = np.exp(expected - expected.max())
    sampling = SamplingParams(1.0, presence_penalty=0.5, frequency_penalty=0.25)
    np.testing.assert_allclose(ours(sampling, logits), expected / expected.sum(), atol=1e-6)


def test_a_processor_survives_its_tensor() -> None:
    for sampling in (
        SamplingParams(0.7, 5, 0.9, 0.1, 1.1, 0.2, 0.3, 4, ((1, 2), (3,)), 2, 9),
        SamplingParams(logprobs=0),
        SamplingParams(min_tokens=3),
        SamplingParams(logit_bias=((3, -100.0), (1, 0.5))),
        SamplingParams(include_drafting=True),
    ):
        processor = LogitsProcessor(sampling, 12, (5, 6))
        assert processor.encode()
        assert decode(processor.encode()) == processor
    assert LogitsProcessor(SamplingParams(), 12, (5, 6)).encode() == b""
    assert decode(b"").greedy


# --- through the engines --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(built_pair: BuildPair) -> BuiltPair:
    return built_pair(family="llama", layers=4, taps=(0, 2), draft_layers=2)


def decoded(built: BuiltPair, requests: list[Request], *, drafting: bool) -> list[SequenceState]:
    drafter = Engine(built.drafter_engine) if drafting else None
    rounds = in_process(Engine(built.target_engine), drafter)
    return run_all(scheduler_of(rounds, Fixed(7 if drafting else 0), prefill_chunk=7), requests)


RULES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "repetition": ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
    "bad_words": (
        {"bad_words": ((258,), (54, 95), (95, 95, 95), (99, 11))},
        {"bad_words_ids": [[258], [54, 95], [95, 95, 95], [99, 11]]},
    ),
    "both": (
        {"repetition_penalty": 0.8, "bad_words": ((258,), (95, 95))},
        {"repetition_penalty": 0.8, "bad_words_ids": [[258], [95, 95]]},
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_greedy_text_under_rules_is_transformers(name: str, built: BuiltPair) -> None:
    values, options = RULES[name]
    prompts = [text[:12] for text in built.texts[:4]]
    model = reference.load_target(built.pair.target_dir)
    with torch.inference_mode():
        output = model.generate(
            torch.tensor(prompts), do_sample=False, max_new_tokens=40, pad_token_id=0, **options
        )
    plain = reference.greedy(built.pair.target_dir, prompts, 40)
    expected = output[:, 12:].tolist()
    assert expected != plain, "the rule changes nothing"
    requests = [Request(prompt, 40, SamplingParams(**values)) for prompt in prompts]
    sequences = decoded(built, [*requests, *(Request(p, 40) for p in prompts)], drafting=True)
    assert [s.tokens for s in sequences] == expected + plain
    assert sum(s.accepted for s in sequences[:4]) > 0, "no draft was ever kept under the rule"


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_logprobs_are_the_targets(temperature: float, built: BuiltPair) -> None:
    prompts = [text[: 10 + i] for i, text in enumerate(built.texts[:3])]
    sampling = SamplingParams(temperature, repetition_penalty=1.2, logprobs=3, seed=5)
    requests = [
        Request(prompts[0], 20, sampling),
        Request(prompts[1], 20, SamplingParams(temperature)),
        Request(prompts[2], 20, SamplingParams(temperature, logprobs=0)),
    ]
    sequences = decoded(built, requests, drafting=True)
    assert sequences[1].logprobs == []
    for sequence, prompt, count in zip(sequences[::2], prompts[::2], (3, 0), strict=True):
        logits, _ = reference.target_logits_and_taps(
            built.pair.target_dir, prompt + sequence.tokens, [0]
        )
        expected = torch.log_softmax(torch.from_numpy(logits), -1).numpy()[len(prompt) - 1 : -1]
        assert len(sequence.logprobs) == len(sequence.logprob_ids) == 20
        for token, ids, values, line in zip(
            sequence.tokens, sequence.logprob_ids, sequence.logprobs, expected, strict=True
        ):
            assert ids == [token, *np.argsort(-line, kind="stable")[:count].tolist()]
            np.testing.assert_allclose(values, line[ids], atol=1e-4)

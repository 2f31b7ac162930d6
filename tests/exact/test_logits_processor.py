"""Penalties, forbidden words and least lengths, against `transformers`; what a row is told.

Log-probabilities through the engines are in `test_reported.py`.
"""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from dflash_trt.decoding import SamplingParams
from dflash_trt.decoding.acceptance import Accepted
from dflash_trt.decoding.logits_processor import LogitsProcessor, decode_processor
from dflash_trt.decoding.logprobs import draft_logprobs, log_probabilities, tokens_to_score
from dflash_trt.decoding.messages import RoundSequence

VOCAB, PROMPT, OUTPUT = 50, [3, 4, 3, 9], [7, 9, 7, 7]
STOP = (5, 6)


def ours(sampling: SamplingParams, logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    weights = LogitsProcessor(sampling, len(PROMPT), STOP).weights(logits, 8, PROMPT + OUTPUT)
    kept = np.zeros(VOCAB, np.float32)
    kept[slice(None) if weights.ids is None else weights.ids] = weights.values
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
    """By OpenAI's definition presence counts once, frequency each time, and the prompt never."""
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
        assert processor.encoded
        assert decode_processor(processor.encoded) == processor
    assert LogitsProcessor(SamplingParams(), 12, (5, 6)).encoded == b""
    assert decode_processor(b"").greedy


def row_of(tokens: list[int], sampling: SamplingParams) -> RoundSequence:
    return RoundSequence(tokens, 1, 20, 9, processor=LogitsProcessor(sampling, 1, ()))


def test_of_drafts_those_that_follow_what_was_kept() -> None:
    logits = np.random.default_rng(1).normal(0, 3, (2, 6, VOCAB)).astype(np.float32)
    drafts = [4, 5, 6, 7, 8]
    values = np.array(draft_logprobs(drafts, log_probabilities(logits[0], drafts[:3], 0)))
    assert values.shape == (5,)
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = [probabilities[0, node, token] for node, token in ((0, 4), (1, 5), (2, 6))]
    np.testing.assert_allclose(np.exp(values[:3]), expected, rtol=1e-4)
    assert np.isnan(values[3:]).all()  # these follow one that was refused
    # the other row has what it has alone: nothing of the logits behind its own drafts
    scoring = row_of([9, 4, 5], SamplingParams(logprobs=2))
    tokens = tokens_to_score(scoring, Accepted(1, 12))
    scored = log_probabilities(logits[1], tokens, 2)
    alone = log_probabilities(logits[1, :3], tokens, 2)
    assert (scored.values.shape, scored.ids.shape) == ((2, 3), (2, 3))
    np.testing.assert_array_equal(scored.values, alone.values)
    np.testing.assert_array_equal(scored.ids, alone.ids)
    np.testing.assert_allclose(
        np.exp(scored.values[:, 0]), [probabilities[1, 0, 4], probabilities[1, 1, 12]], rtol=1e-4
    )

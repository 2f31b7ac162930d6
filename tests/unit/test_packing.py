"""Rounds as tensors and back: one is the other's inverse."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.decoding import (
    Candidates,
    Copy,
    DraftResult,
    Features,
    Logprobs,
    Round,
    RoundResult,
    RoundSequence,
    SamplingParams,
    SequenceResult,
)
from dflash_trt.decoding.logits_processor import PLAIN_GREEDY, LogitsProcessor
from dflash_trt.decoding.messages import Anchor, DrafterInput, VerifyResult
from dflash_trt.decoding.packing import (
    CheckedTensors,
    DraftInputTensors,
    RoundResultTensors,
    pack_drafts,
    pack_round,
    pack_verified,
    unpack_batch,
    unpack_drafter_input,
    unpack_result,
    unpack_round,
)
from dflash_trt.engines import FIRST_BLOCK, FIRST_STATE

WORDS = 3  # of a grammar's mask
TOKENS = st.integers(0, 95)
COPIES = st.builds(
    Copy,
    source=st.sampled_from([0, 3, FIRST_BLOCK + 1, FIRST_STATE]),
    destination=st.sampled_from([None, 0, 2, FIRST_BLOCK, FIRST_STATE + 7]),
    tokens=st.integers(0, 99),
    start=st.integers(0, 99),
)
SAMPLING = st.sampled_from(
    [
        SamplingParams(),
        SamplingParams(0.7, seed=2**62),
        SamplingParams(logprobs=0),
        SamplingParams(logprobs=2, bad_words=((1, 2),)),
        SamplingParams(logprobs=1, include_drafting=True),
        SamplingParams(include_drafting=True),
    ]
)


@st.composite
def sequences(draw: st.DrawFn) -> RoundSequence:
    tokens = draw(st.lists(TOKENS, min_size=1, max_size=5))
    known = draw(st.integers(1, len(tokens)))
    processor = LogitsProcessor(draw(SAMPLING), 4, (95,))
    if not processor.encoded:
        processor = PLAIN_GREEDY
    history = draw(st.lists(TOKENS, max_size=4)) if processor.needs_history else []
    sequence = RoundSequence(
        tokens,
        known,
        position=draw(st.integers(4, 900)),
        budget=draw(st.integers(0, 50)),
        replayed=draw(st.integers(0, 7)),
        processor=processor,
        history=history,
        next_token=draw(st.none() | TOKENS),
    )
    if draw(st.booleans()):
        mask = st.lists(st.integers(0, 2**31 - 1), min_size=WORDS, max_size=WORDS)
        nodes = [draw(st.none() | mask) for _ in range(1 + len(sequence.drafts))]
        masks = [None if bits is None else np.array(bits, np.int32) for bits in nodes]
        sequence.masks = masks if any(bits is not None for bits in nodes) else ()
    return sequence


ROUNDS = st.builds(
    Round,
    first_slot=st.integers(0, 31),
    sequences=st.lists(sequences(), min_size=1, max_size=4),
    features=st.sampled_from(Features),
    draft_tokens=st.integers(0, 15),
    candidates=st.integers(1, 64),
    copies=st.lists(COPIES, max_size=3),
)


def shown(value: Any) -> Any:
    """Return a value whose text is the same if all that is in it is."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [shown(part) for part in value]
    if dataclasses.is_dataclass(value):
        return {
            field.name: shown(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    return repr(value)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(ROUNDS)
def test_a_round_is_the_same_as_before(round: Round) -> None:
    tensors = pack_round(round)
    assert all(tensor.size for tensor in tensors), "the ensemble passes no empty tensor on"
    assert shown(unpack_round(tensors)) == shown(round)
    assert shown(unpack_batch(tensors.batch)) == shown(dataclasses.replace(round, sequences=()))


def result_of(sequence: RoundSequence, dice: np.random.Generator) -> SequenceResult:
    if dice.random() < 0.2:
        return SequenceResult(0, 0, failed=True, buffered=3)
    accepted = int(dice.integers(1 + len(sequence.drafts)))
    result = SequenceResult(accepted, 17, buffered=[None, 0, 200][dice.integers(3)])
    sampling = sequence.processor.sampling
    if sampling.logprobs is not None:
        shape = 1 + accepted, 1 + sampling.logprobs
        values = dice.normal(size=shape).astype(np.float32)
        result.logprobs = Logprobs(values, dice.integers(96, size=shape))
    if sampling.include_drafting:
        scores = np.full(len(sequence.drafts), np.nan, np.float32)
        scores[: accepted + 1] = dice.normal(size=len(scores[: accepted + 1]))
        result.draft_logprobs = scores.tolist()
    return result


@settings(max_examples=200, deadline=None, derandomize=True)
@given(ROUNDS, st.integers(0, 2**32))
def test_a_result_is_the_same_as_before(round: Round, seed: int) -> None:
    dice = np.random.default_rng(seed)
    results, drafts = [result_of(sequence, dice) for sequence in round.sequences], None
    if seed % 3:
        depth, best = dice.integers(1, 5, size=2)
        ids = dice.integers(96, size=(len(results), depth, best))
        probs = dice.random((len(results), depth, best), np.float32)
        drafts = DraftResult([Candidates(*of_row) for of_row in zip(ids, probs, strict=True)], 0.25)
    verified = pack_verified(VerifyResult(results, 0.5))
    checked = CheckedTensors(*verified[:4])
    drafted = pack_drafts(drafts, len(results))
    both = RoundResultTensors(*checked, *drafted)
    assert all(np.size(tensor) for tensor in (*verified, *drafted))
    assert shown(unpack_result(both, round)) == shown(RoundResult(results, 0.5, drafts))
    alone = unpack_result(checked, round)
    assert shown(alone) == shown(RoundResult(results, 0.5))


@pytest.mark.parametrize("failed", [False, True])
def test_what_the_drafter_takes_in_is_the_same_as_before(failed: bool) -> None:
    features = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    drafter_input = DrafterInput(features, [Anchor(7, 30, 28, 5), Anchor(0, 9, 0, 0, failed)])
    tensors = pack_verified(VerifyResult([SequenceResult(0, 7)] * 2, 0.5, drafter_input))
    given = DraftInputTensors(np.zeros(4, np.int64), tensors.features, tensors.anchors)
    assert shown(unpack_drafter_input(given)) == shown(drafter_input)


def test_without_features_the_drafter_does_nothing() -> None:
    tensors = pack_verified(VerifyResult([SequenceResult(0, 7)] * 2, 0.5))
    given = DraftInputTensors(np.zeros(4, np.int64), tensors.features, tensors.anchors)
    assert unpack_drafter_input(given) is None


def test_of_a_scored_prompt_all_log_probabilities_come_back() -> None:
    sampling = SamplingParams(logprobs=1, prompt_logprobs=True)
    sequence = RoundSequence(
        [4, 5, 6], 3, 0, 0, processor=LogitsProcessor(sampling, 9, ()), next_token=7
    )
    logprobs = Logprobs(np.arange(6, dtype=np.float32).reshape(3, 2), np.arange(6).reshape(3, 2))
    result = SequenceResult(0, 8, logprobs=logprobs)
    round = Round(0, [sequence], Features.KEEP)
    checked = CheckedTensors(*pack_verified(VerifyResult([result], 0.5))[:4])
    assert shown(unpack_result(checked, unpack_round(pack_round(round))).results) == shown([result])

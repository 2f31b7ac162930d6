"""Rounds as tensors of the Triton ensemble, and back. A field's name is its tensor's.

There are few tensors, because each costs time that matters with a small model. None is empty: the
ensemble passes no empty ones on. n sequences are in a round, S tokens of each at most, D drafts, K
log-probabilities and C features. A float has shape `[1]`.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from dflash_trt.decoding.arrays import Bytes, Float32, Int32, Int64
from dflash_trt.decoding.logits_processor import decode_processor
from dflash_trt.decoding.messages import (
    Anchor,
    Candidates,
    Copy,
    DrafterInput,
    DraftResult,
    Logprobs,
    Round,
    RoundResult,
    RoundSequence,
    SequenceResult,
    VerifyResult,
)
from dflash_trt.speculation import Features

NONE = (
    -1
)  # in any tensor, where a value is None, a sequence shorter than others, or all bits are set
COPY_NUMBERS = 4  # in `RoundTensors.batch`


class RoundTensors(NamedTuple):
    """A `Round`: the input of the ensemble."""

    batch: Int64  # [4 + 4m]: first slot, `Features`, draft tokens, candidates, then m copies
    # [n, 7]: number of tokens and of known ones, position, budget, replayed drafts, next token,
    # 1 if the drafter follows
    sequences: Int64
    tokens: Int64  # [n, S]
    sampling: Bytes  # [n]: `LogitsProcessor.encoded`
    history: Int64  # [n, L]
    masks: Int32  # [n, 1 + D, vocab / 32]; [n, 1, 1] if all tokens are allowed


class CheckedTensors(NamedTuple):
    """The output of `verify` for the scheduler."""

    results: (
        Int64  # [n, 4]: accepted drafts, the target's token, 1 if the sequence failed, buffered
    )
    # [n, D + 1, 1 + K], and with `include_drafting` one more column, of the drafts, one line below
    # the tokens they follow; [n, 1, 1] if not requested
    logprobs: Float32
    logprob_ids: Int64  # [n, D + 1, 1 + K]; [n, 1, 1] if not requested
    verify_seconds: float


class VerifyTensors(NamedTuple):
    """All outputs of `verify`; a `DrafterInput` stays in the ensemble."""

    results: Int64
    logprobs: Float32
    logprob_ids: Int64
    verify_seconds: float
    features: Float32  # [n, C, taps * hidden_size]
    # [n, 5]: the anchor's token and position, of the first feature, room, 1 if the sequence failed;
    # all NONE if the drafter does not run
    anchors: Int64


class DraftInputTensors(NamedTuple):
    """The input of `draft`."""

    batch: Int64
    features: Float32
    anchors: Int64


class DraftTensors(NamedTuple):
    """A `DraftResult`: the output of `draft`."""

    candidate_ids: Int64  # [n, D, k]; [n, 1, 1] of NONE if the drafter did not run
    candidate_probs: Float32  # [n, D, k] or [n, D, k * k]
    draft_seconds: float


class RoundResultTensors(NamedTuple):
    """A `RoundResult`: the output of the ensemble."""

    results: Int64
    logprobs: Float32
    logprob_ids: Int64
    verify_seconds: float
    candidate_ids: Int64
    candidate_probs: Float32
    draft_seconds: float


def pack_round(round: Round) -> RoundTensors:
    sequences = round.sequences
    batch = [round.first_slot, round.features.value, round.draft_tokens, round.candidates]
    for copy in round.copies:
        batch += [copy.source, _number(copy.destination), copy.tokens, copy.start]
    numbers = [
        (
            len(sequence.tokens),
            sequence.known,
            sequence.position,
            sequence.budget,
            sequence.replayed,
            _number(sequence.next_token),
            int(sequence.follows),
        )
        for sequence in sequences
    ]
    sampling = np.empty(len(sequences), object)
    sampling[:] = [sequence.processor.encoded for sequence in sequences]
    return RoundTensors(
        batch=np.array(batch),
        sequences=np.array(numbers),
        tokens=_padded([sequence.tokens for sequence in sequences]),
        sampling=sampling,
        history=_padded([sequence.history for sequence in sequences]),
        masks=_pack_masks(sequences),
    )


def unpack_round(tensors: RoundTensors) -> Round:
    lines = zip(
        tensors.sequences.tolist(),
        tensors.tokens.tolist(),
        tensors.sampling.tolist(),
        tensors.history.tolist(),
        strict=True,
    )
    has_masks = bool((tensors.masks != NONE).any())
    sequences = []
    for index, (numbers, tokens, encoded, history) in enumerate(lines):
        length, known, position, budget, replayed, next_token, follows = numbers
        sequence = RoundSequence(
            tokens[:length],
            known,
            position,
            budget,
            replayed,
            decode_processor(encoded),
            [token for token in history if token != NONE],
            next_token=_optional(next_token),
            follows=bool(follows),
        )
        if has_masks:
            sequence.masks = _unpack_masks(tensors.masks[index], len(sequence.drafts))
        sequences.append(sequence)
    round = unpack_batch(tensors.batch)
    round.sequences = sequences
    return round


def unpack_batch(batch: Int64) -> Round:
    """Return a round without sequences: all that `draft` needs of it."""
    first_slot, features, draft_tokens, candidates, *numbers = batch.tolist()
    copies = []
    for index in range(0, len(numbers), COPY_NUMBERS):
        source, destination, tokens, start = numbers[index : index + COPY_NUMBERS]
        copies.append(Copy(source, _optional(destination), tokens, start))
    return Round(first_slot, (), Features(features), draft_tokens, candidates, copies)


def pack_verified(verified: VerifyResult) -> VerifyTensors:
    numbers = [
        (result.accepted, result.token, int(result.failed), _number(result.buffered))
        for result in verified.results
    ]
    logprobs, logprob_ids = _pack_logprobs(verified.results)
    features, anchors = _pack_drafter_input(verified.drafter_input, len(numbers))
    return VerifyTensors(
        np.array(numbers), logprobs, logprob_ids, verified.seconds, features, anchors
    )


def nothing_to_draft() -> DraftInputTensors:
    """Return the input of `draft` in a round that it has no part in."""
    batch = np.array([0, Features.DROP.value, 0, 1])
    return DraftInputTensors(batch, *_pack_drafter_input(None, 1))


def unpack_drafter_input(tensors: DraftInputTensors) -> DrafterInput | None:
    numbers = tensors.anchors.tolist()
    if numbers[0][0] == NONE:
        return None
    anchors = [
        Anchor(token, position, start, room, bool(failed))
        for token, position, start, room, failed in numbers
    ]
    return DrafterInput(tensors.features, anchors)


def pack_drafts(drafts: DraftResult | None, n: int) -> DraftTensors:
    """Return the tensors of n sequences."""
    if drafts is None:
        return DraftTensors(np.full((n, 1, 1), NONE), np.zeros((n, 1, 1), np.float32), 0.0)
    return DraftTensors(
        np.array([candidates.ids for candidates in drafts.candidates]),
        np.array([candidates.probs for candidates in drafts.candidates]),
        drafts.seconds,
    )


def unpack_result(tensors: CheckedTensors | RoundResultTensors, round: Round) -> RoundResult:
    """Return the result of `round`, of the ensemble or of `verify` alone."""
    results = []
    for index, (accepted, token, failed, buffered) in enumerate(tensors.results.tolist()):
        result = SequenceResult(accepted, token, bool(failed), _optional(buffered))
        if not failed:
            _unpack_logprobs(result, round.sequences[index], tensors, index)
        results.append(result)
    drafts = _unpack_drafts(tensors) if isinstance(tensors, RoundResultTensors) else None
    return RoundResult(results, tensors.verify_seconds, drafts)


def _unpack_drafts(tensors: RoundResultTensors) -> DraftResult | None:
    if tensors.candidate_ids[0, 0, 0] == NONE:
        return None
    pairs = zip(tensors.candidate_ids, tensors.candidate_probs, strict=True)
    return DraftResult([Candidates(ids, probs) for ids, probs in pairs], tensors.draft_seconds)


def _pack_masks(sequences: Sequence[RoundSequence]) -> Int32:
    n = len(sequences)
    words = max(
        (len(mask) for sequence in sequences for mask in sequence.masks if mask is not None),
        default=0,
    )
    if not words:
        return _no_masks(n)
    longest = max(len(sequence.masks) for sequence in sequences)
    tensor = np.full((n, longest, words), NONE, np.int32)
    for sequence, masks in zip(sequences, tensor, strict=True):
        for mask, bits in zip(sequence.masks, masks, strict=False):
            if mask is not None:
                bits[:] = mask
    return tensor


def _unpack_masks(tensor: Int32, drafts: int) -> Sequence[Int32 | None]:
    masks = [None if (mask == NONE).all() else mask for mask in tensor[: 1 + drafts]]
    if all(mask is None for mask in masks):
        return ()
    return masks


def _pack_logprobs(results: Sequence[SequenceResult]) -> tuple[Float32, Int64]:
    n = len(results)
    tokens = [0 if result.logprobs is None else len(result.logprobs.ids) for result in results]
    drafts = [len(result.draft_logprobs) for result in results]
    if not any(tokens) and not any(drafts):
        return np.zeros((n, 1, 1), np.float32), np.zeros((n, 1, 1), np.int64)
    width = max(
        (result.logprobs.ids.shape[1] for result in results if result.logprobs is not None),
        default=1,
    )
    shape = n, max(*tokens, *(1 + count for count in drafts)), width
    values = np.zeros((*shape[:2], width + any(drafts)), np.float32)
    ids = np.zeros(shape, np.int64)
    for index, result in enumerate(results):
        if result.logprobs is not None:
            count, columns = result.logprobs.ids.shape
            values[index, :count, :columns] = result.logprobs.values
            ids[index, :count, :columns] = result.logprobs.ids
        values[index, 1 : 1 + len(result.draft_logprobs), -1] = result.draft_logprobs
    return values, ids


def _unpack_logprobs(
    result: SequenceResult,
    sequence: RoundSequence,
    tensors: CheckedTensors | RoundResultTensors,
    index: int,
) -> None:
    sampling = sequence.processor.sampling
    if sampling.logprobs is not None:
        count = sequence.known if sequence.scores_prompt else 1 + result.accepted
        columns = 1 + sampling.logprobs
        values = tensors.logprobs[index, :count, :columns]
        result.logprobs = Logprobs(values, tensors.logprob_ids[index, :count, :columns])
    if sampling.include_drafting:
        scores = tensors.logprobs[index, 1 : 1 + len(sequence.drafts), -1]
        result.draft_logprobs = scores.tolist()


def _pack_drafter_input(drafter_input: DrafterInput | None, n: int) -> tuple[Float32, Int64]:
    if drafter_input is None:
        return np.zeros((n, 1, 1), np.float32), np.full((n, 5), NONE)
    anchors = [
        (anchor.token, anchor.position, anchor.start, anchor.room, int(anchor.failed))
        for anchor in drafter_input.anchors
    ]
    return drafter_input.features, np.array(anchors)


def _padded(lines: Sequence[Sequence[int]]) -> Int64:
    """Return `[n, longest]`, at least one column."""
    longest = max(1, *map(len, lines))
    if longest == 1 and not any(lines):
        return _no_tokens(len(lines))
    return np.array([[*line, *[NONE] * (longest - len(line))] for line in lines])


@lru_cache(maxsize=256)
def _no_tokens(n: int) -> Int64:
    return np.full((n, 1), NONE)


@lru_cache(maxsize=256)
def _no_masks(n: int) -> Int32:
    return np.full((n, 1, 1), NONE, np.int32)


def _number(value: int | None) -> int:
    return NONE if value is None else value


def _optional(number: int) -> int | None:
    return None if number == NONE else number

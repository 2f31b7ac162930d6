"""One round: verify, then draft. NumPy calls are few: each costs microseconds per round."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dflash_trt.decoding.acceptance import Accepted
from dflash_trt.decoding.arrays import Bools, FeatureArray, Float32, Int64
from dflash_trt.decoding.feature_buffer import FeatureBuffer
from dflash_trt.decoding.logprobs import draft_logprobs, tokens_to_score
from dflash_trt.decoding.messages import (
    Anchor,
    Candidates,
    Copy,
    DrafterInput,
    DraftResult,
    Round,
    RoundResult,
    RoundSequence,
    RunRound,
    SequenceResult,
    VerifyResult,
)
from dflash_trt.decoding.step_logits import Scored, StepLogits, logits_of
from dflash_trt.engines import Engine, Step, most_buffered
from dflash_trt.speculation import Features


def verify(engine: Engine, round: Round, buffer: FeatureBuffer | None = None) -> VerifyResult:
    """Run the target over the tokens, write their KV entries and decide which drafts are accepted.

    buffer: for features that the drafter takes in later; None: there is no drafter.
    """
    started = time.perf_counter()
    sequences = round.sequences
    n = len(sequences)
    perform_copies(engine, round.copies)
    last = max(sequence.position for sequence in sequences)
    width = engine.info.padded_width(round.width, last)
    step = _target_step(engine, round, width)
    # where a prompt's log-probabilities are requested, all tokens of its chunk are scored (see
    # `_target_step`); those before the last known token choose no token
    skipped = sequences[0].known - 1 if _scores_prompt(round) else 0
    logits = logits_of(step, n, skipped)
    results = _sequence_results(sequences, logits.accept(sequences), logits)
    _clear_failed(engine, round.first_slot, [result.failed for result in results])
    drafter_input = None
    if buffer is not None:
        features = step.outputs["features"][:, :width]
        drafter_input = _pass_features_on(buffer, round, results, features)
    elif round.features is Features.DROP:
        for result in results:
            result.buffered = None
    return VerifyResult(results, time.perf_counter() - started, drafter_input)


def _target_step(engine: Engine, round: Round, width: int) -> Step:
    """Return a round's step, its inputs filled in; width: tokens of a sequence, with padding."""
    sequences, n = round.sequences, len(round.sequences)
    min_width = -(-engine.least_tokens // n)
    width = max(width, min_width)
    lengths = tuple(len(sequence.tokens) for sequence in sequences)
    firsts = (0,) if _scores_prompt(round) else tuple(sequence.known - 1 for sequence in sequences)
    scored = max(length - first for length, first in zip(lengths, firsts, strict=True))
    scored = engine.info.padded_round(scored)
    scored_tokens = _scored_tokens(firsts, lengths, scored, width, engine.least_tokens)
    longest = max(sequence.position for sequence in sequences) + width
    step = engine.step(round.first_slot, n, width, _visible(engine, longest), len(scored_tokens))
    inputs = step.inputs
    inputs["tokens"][:] = 0
    for tokens, sequence in zip(inputs["tokens"], sequences, strict=True):
        tokens[: len(sequence.tokens)] = sequence.tokens
    inputs["write_index"][:] = [sequence.position for sequence in sequences]
    inputs["scored_tokens"][:] = scored_tokens
    if engine.info.states is not None:
        _begin_states(engine, round)
        inputs["known"][:] = sequences[0].known
        inputs["accepted"][:] = [sequence.replayed for sequence in sequences]
    inputs["positions"][:] = inputs["write_index"][:, None] + np.arange(width)
    mask = inputs["mask"]
    mask[:] = False
    for index, sequence in enumerate(sequences):
        position = sequence.position
        mask[index, :, :, :position] = True
        mask[index, :, :, position : position + width] = _causal_mask(width)
    return step


def _scores_prompt(round: Round) -> bool:
    return len(round.sequences) == 1 and round.sequences[0].scores_prompt


def _begin_states(engine: Engine, round: Round) -> None:
    """Reset the states of slots whose texts begin; the mask hides old KV entries, but no state."""
    for slot, sequence in enumerate(round.sequences, round.first_slot):
        if sequence.position == 0:
            engine.reset_state(slot)


def _sequence_results(
    sequences: Sequence[RoundSequence], acceptances: Sequence[Accepted | None], logits: StepLogits
) -> list[SequenceResult]:
    """Return the results with the log-probabilities that are requested."""
    results = [
        SequenceResult(accepted=0, token=0, failed=True)
        if chosen is None
        else SequenceResult(chosen.drafts, chosen.token)
        for chosen in acceptances
    ]
    of_texts, of_drafts = list[Scored](), list[Scored]()
    for index, (sequence, chosen) in enumerate(zip(sequences, acceptances, strict=True)):
        if chosen is None:
            continue
        sampling = sequence.processor.sampling
        if sampling.logprobs is not None:
            of_texts.append(Scored(index, tokens_to_score(sequence, chosen), sampling.logprobs))
        if sampling.include_drafting:
            of_drafts.append(Scored(index, sequence.drafts[: chosen.drafts + 1], 0))
    scores = logits.log_probabilities([*of_texts, *of_drafts])
    for scored, logprobs in zip(of_texts, scores, strict=False):
        results[scored.sequence].logprobs = logprobs
    for scored, logprobs in zip(of_drafts, scores[len(of_texts) :], strict=True):
        drafts = sequences[scored.sequence].drafts
        results[scored.sequence].draft_logprobs = draft_logprobs(drafts, logprobs)
    return results


def _pass_features_on(
    buffer: FeatureBuffer, round: Round, results: Sequence[SequenceResult], features: FeatureArray
) -> DrafterInput | None:
    """Give a round's features to the drafter or the buffer; the results get what is buffered."""
    passed = buffer.pass_on(round, [result.accepted for result in results], features)
    for result, count in zip(results, passed.buffered, strict=True):
        result.buffered = count
    if passed.features is None:
        return None
    anchors = [
        Anchor(
            token=result.token,
            position=sequence.position + sequence.known + result.accepted,
            start=sequence.position - before,
            room=max(sequence.budget - result.accepted - 1, 0),
            failed=result.failed,
        )
        for sequence, result, before in zip(round.sequences, results, passed.before, strict=True)
    ]
    return DrafterInput(passed.features, anchors)


def draft(engine: Engine, round: Round, drafter_input: DrafterInput | None) -> DraftResult | None:
    """Inject the features and fill one block of masks after each sequence's new anchor.

    Features of rejected drafts are injected too: the mask hides them and the next round overwrites
    them. Without an input only the copies are done. The sequences of the round are not read.
    """
    started = time.perf_counter()
    perform_copies(engine, round.copies)
    if drafter_input is None:
        return None
    anchors = drafter_input.anchors
    n = len(anchors)
    # fewer drafts do not shorten the block, because drafts are better in a whole one
    most_drafts = engine.info.block_size - 1
    lengths = [min(anchor.room, most_drafts) for anchor in anchors]
    # what is recorded is the whole block, too, so that sizes are few
    longest = most_drafts if engine.info.records_steps else max(1, *lengths)
    depth = min(longest, round.draft_tokens)
    first = 0 if engine.info.sample_from_anchor else 1  # the block place of the first draft
    block = _Block(first, lengths, first + longest, depth)
    step = _drafter_step(engine, round.first_slot, drafter_input, block)
    step.run()
    _clear_failed(engine, round.first_slot, [anchor.failed for anchor in anchors])
    ids = step.outputs["top_ids"].reshape(n, depth, -1)[..., : round.candidates].copy()
    probs = _candidate_probs(step, n, depth, round.candidates)
    candidates = [Candidates(*arrays) for arrays in zip(ids, probs, strict=True)]
    return DraftResult(candidates, time.perf_counter() - started)


@dataclass(frozen=True)
class _Block:
    """A block for each anchor: it and masks."""

    first: int  # place of the first draft
    lengths: Sequence[int]  # drafts that each sequence has room for
    width: int  # tokens
    depth: int  # drafts that get logits


def _drafter_step(
    engine: Engine, first_slot: int, drafter_input: DrafterInput, block: _Block
) -> Step:
    """Return the step of a block for each anchor, its inputs filled in."""
    anchors = drafter_input.anchors
    n, context = drafter_input.features.shape[:2]
    longest = max(anchor.start for anchor in anchors) + context + block.width
    visible = _visible(engine, longest)
    step = engine.step(first_slot, n, block.width, visible, n * block.depth, context=context)
    inputs = step.inputs
    starts = np.array([anchor.start for anchor in anchors])
    places = np.array([anchor.position for anchor in anchors])
    inputs["write_index"][:] = starts
    inputs["positions"][:, :context] = starts[:, None] + np.arange(context)
    inputs["positions"][:, context:] = places[:, None] + np.arange(block.width)
    inputs["block"][:] = engine.info.mask_token_id
    inputs["block"][:, 0] = [anchor.token for anchor in anchors]
    inputs["features"][:] = drafter_input.features
    inputs["scored_tokens"][:] = _scored_places(n, block.width, block.first, block.depth)
    mask = inputs["mask"]
    mask[:] = False
    for index, (anchor, length) in enumerate(zip(anchors, block.lengths, strict=True)):
        block_start = anchor.start + context  # its keys follow the features'
        mask[index, :, :, : anchor.position] = True
        # near the end of its text a sequence's block is shorter than the batch's, so that its
        # drafts do not depend on the batch
        mask[index, :, :, block_start : block_start + block.first + length] = True
    return step


def _candidate_probs(step: Step, n: int, depth: int, candidates: int) -> Float32:
    """Return `[n, depth, k]`, or `[n, depth, k * k]`: of each candidate, by the one before."""
    scores = step.outputs.get("pair_scores")
    if scores is None:
        scores = step.outputs["top_logits"].reshape(n, depth, 1, -1)
    else:
        best = scores.shape[-1]
        scores = scores.reshape(n, depth, best, best)[:, :, :candidates]
    probs: Float32 = np.exp(scores - scores.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    return probs[..., :candidates].reshape(n, depth, -1)


def in_process(target: Engine, drafter: Engine | None) -> RunRound:
    """Return rounds on engines of this process; without a drafter the target decodes alone."""
    buffer = None
    if drafter is not None:
        buffer = FeatureBuffer(most_buffered(drafter.info.block_size))

    def run(round: Round) -> RoundResult:
        verified = verify(target, round, buffer)
        drafts = None
        if drafter is not None and round.needs_drafter:
            drafts = draft(drafter, round, verified.drafter_input)
        return RoundResult(verified.results, verified.seconds, drafts)

    return run


def perform_copies(engine: Engine, copies: Iterable[Copy]) -> None:
    """Copy what a round begins with; a slot that is freed may hold anything."""
    for copy in copies:
        if copy.destination is not None:
            engine.copy_kv(copy.source, copy.destination, copy.tokens, copy.start)
        elif not copy.frees_slot:
            engine.drop(copy.source)


def _clear_failed(engine: Engine, first_slot: int, failed: Sequence[bool]) -> None:
    """Clear the slots of failed sequences, whose KV entries may hold NaN."""
    for slot, has_failed in enumerate(failed, first_slot):
        if has_failed:
            engine.clear(slot)


def _visible(engine: Engine, length: int) -> int:
    """Return how many KV entries to attend over, rounded up so that few shapes are bound."""
    step = engine.visible_step
    return min(-(-length // step) * step, engine.info.cache_len)


@lru_cache(maxsize=64)
def _causal_mask(width: int) -> Bools:
    return np.tri(width, dtype=bool)


@lru_cache(maxsize=1024)
def _scored_tokens(
    firsts: tuple[int, ...], lengths: tuple[int, ...], scored: int, width: int, fewest: int
) -> Int64:
    """Return which of the n * width tokens need logits, `[max(n * scored, fewest)]`.

    These are each sequence's tokens from `firsts` on; one with fewer repeats its last.
    """
    first = np.array(firsts)[:, None]
    last = np.array(lengths)[:, None] - 1
    offsets = np.minimum(first + np.arange(scored), last)
    starts = np.arange(len(lengths))[:, None] * width
    scored_tokens: Int64 = (offsets + starts).ravel()
    return np.resize(scored_tokens, max(scored_tokens.size, fewest))


@lru_cache(maxsize=256)
def _scored_places(n: int, block_len: int, first: int, depth: int) -> Int64:
    """Return which block places need logits: `depth` of each block, from `first` on."""
    return np.arange(n * block_len).reshape(n, -1)[:, first : first + depth].ravel()

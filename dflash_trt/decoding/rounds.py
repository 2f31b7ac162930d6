"""One round: verify, then draft. NumPy calls are few: each costs microseconds per round."""

import time
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from dflash_trt.decoding.acceptance import Accepted, accept
from dflash_trt.decoding.feature_buffer import FeatureBuffer
from dflash_trt.decoding.logits_processor import decode_processor
from dflash_trt.decoding.messages import (
    FREED,
    DraftInput,
    DraftOutput,
    Float32,
    Int64,
    RoundOutput,
    RunRound,
    VerifyInput,
    VerifyOutput,
    all_texts_end,
    no_drafts,
    parse_copies,
)
from dflash_trt.decoding.sampling import NO_TOKEN
from dflash_trt.engines import FIRST_BLOCK, NOTHING, Engine


def verify(engine: Engine, x: VerifyInput, buffer: FeatureBuffer | None = None) -> VerifyOutput:
    """Run the target over the tokens, write their KV rows and decide which drafts are accepted."""
    start = time.perf_counter()
    first_slot, _, _, *copies = x.batch.tolist()
    perform_copies(engine, copies)
    n, asked = x.tokens.shape
    least_rows = engine.least_rows
    width = max(asked, -(-least_rows // n))
    lengths, known, places, _, replayed = zip(*x.rows.tolist(), strict=True)
    all_scored = n == 1 and decode_processor(x.sampling[0]).scores_prompt(places[0])
    before = known[0] - 1 if all_scored else 0  # rows of logits before the last known token's
    scored = _scored_rows((1,) if all_scored else known, lengths, width, least_rows)
    step = engine.step(first_slot, n, width, _visible(engine, max(places) + width), len(scored))
    step.inputs["tokens"][:, :asked] = x.tokens
    step.inputs["tokens"][:, asked:] = 0
    step.inputs["write_index"][:] = places
    step.inputs["head_rows"][:] = scored
    if engine.info.states is not None:
        _begin_states(engine, first_slot, places)
        step.inputs["known"][:] = known[0]
        step.inputs["accepted"][:] = replayed
    positions, mask = step.inputs["positions"], step.inputs["mask"]
    mask[:] = False
    for i, place in enumerate(places):
        positions[i] = range(place, place + width)
        mask[i, :, :, :place] = True
        mask[i, :, :, place : place + width] = _causal_mask(width)
    step.run()
    outputs = step.outputs
    finite = np.isfinite(outputs["top_logits"])
    own = np.where(finite, outputs["top_ids"], NO_TOKEN).reshape(n, -1)[:, before:].tolist()
    features = np.empty((n, asked, 0), np.float32)
    if engine.info.feature_size:
        features = outputs["features"][:, :asked]
    logits = outputs["logits"].reshape(n, before + len(own[0]), -1)
    kept = accept(x, own, logits[:, before:])
    logprobs, ids = committed_logprobs(x, kept, logits)
    committed = [each or (-1, 0) for each in kept]
    accepted = [count for count, _ in committed]
    _clear_failed(engine, first_slot, accepted)
    older = [0] * n
    if buffer is not None:
        features, older = buffer.pass_on(x, accepted, features)
    results = np.array([[*each, count] for each, count in zip(committed, older, strict=True)])
    return VerifyOutput(results, features, logprobs, ids, time.perf_counter() - start)


def _begin_states(engine: Engine, first_slot: int, places: Sequence[int]) -> None:
    """Reset the states of slots whose texts begin; the mask hides old KV rows, but no state."""
    for slot, place in enumerate(places, first_slot):
        if place == 0:
            engine.copy_kv(NOTHING, slot, 0)


def _clear_failed(engine: Engine, first_slot: int, accepted: Sequence[int]) -> None:
    """Clear the slots of failed rows, whose KV rows may hold NaN."""
    for slot, count in enumerate(accepted, first_slot):
        if count < 0:
            engine.copy_kv(NOTHING, slot, engine.info.cache_len)


def draft(engine: Engine, x: DraftInput) -> DraftOutput:
    """Inject the features and fill one block of masks after each sequence's new anchor.

    Features of rejected drafts are injected too: the mask hides them and the next round overwrites
    them.
    """
    start = time.perf_counter()
    first_slot, num_draft_tokens, candidates, *copies = x.batch.tolist()
    perform_copies(engine, copies)
    n, context = x.features.shape[:2]
    rows, results, mask_token = x.rows.tolist(), x.results.tolist(), engine.info.mask_token_id
    # fewer wanted drafts do not shorten the block, because drafts are better in a whole one
    lengths = [
        min(max(budget - accepted - 1, 0), engine.info.block_size - 1)
        for (_, _, _, budget, _), (accepted, _, _) in zip(rows, results, strict=True)
    ]
    if num_draft_tokens <= 0 or all_texts_end(rows, results):
        return no_drafts(n)
    longest = max(1, *lengths)
    depth = min(longest, num_draft_tokens)
    first = 0 if engine.info.sample_from_anchor else 1  # the block row of the first draft
    block_len = first + longest
    starts = [row[2] - result[2] for row, result in zip(rows, results, strict=True)]
    visible = _visible(engine, max(starts) + context + block_len)
    step = engine.step(first_slot, n, block_len, visible, n * depth, context=context)
    block, positions, mask = [], [], step.inputs["mask"]
    mask[:] = False
    for i, ((_, known, place, *_), start_at) in enumerate(zip(rows, starts, strict=True)):
        accepted, token, _ = results[i]
        anchor = place + known + max(accepted, 0)
        block.append([token] + [mask_token] * (block_len - 1))
        positions.append([*range(start_at, start_at + context), *range(anchor, anchor + block_len)])
        mask[i, :, :, :anchor] = True
        # the block's keys follow the features'; near the end of its text a row's block is shorter
        # than the batch's, so that its drafts do not depend on the batch
        mask[i, :, :, start_at + context : start_at + context + first + lengths[i]] = True
    step.inputs["block"][:] = block
    step.inputs["positions"][:] = positions
    step.inputs["write_index"][:] = starts
    step.inputs["features"][:] = x.features
    step.inputs["head_rows"][:] = _draft_rows(n, block_len, first, depth)
    step.run()
    _clear_failed(engine, first_slot, [accepted for accepted, _, _ in results])
    ids = step.outputs["top_ids"].reshape(n, depth, -1)[..., :candidates].copy()
    scores = step.outputs.get("pair_scores")
    if scores is None:
        scores = step.outputs["top_logits"].reshape(n, depth, 1, -1)
    else:  # of each candidate, by the candidate before
        k = scores.shape[-1]
        scores = scores.reshape(n, depth, k, k)[:, :, :candidates]
    probs: Float32 = np.exp(scores - scores.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    probs = probs[..., :candidates].reshape(n, depth, -1)
    return DraftOutput(ids, probs, time.perf_counter() - start)


@lru_cache(maxsize=64)
def _causal_mask(width: int) -> npt.NDArray[np.bool_]:
    return np.tri(width, dtype=bool)


@lru_cache(maxsize=1024)
def _scored_rows(known: tuple[int, ...], lengths: tuple[int, ...], width: int, least: int) -> Int64:
    """Return which of the n * width tokens need logits, `[max(n * (1 + most drafts), least)]`.

    These are each row's last known token and its drafts; a shorter row repeats its last token.
    """
    first, last = np.array(known)[:, None] - 1, np.array(lengths)[:, None] - 1
    offsets = np.minimum(first + np.arange(int((last - first).max()) + 1), last)
    rows: Int64 = (offsets + np.arange(len(known))[:, None] * width).ravel()
    return np.resize(rows, max(rows.size, least))


@lru_cache(maxsize=256)
def _draft_rows(n: int, size: int, first: int, depth: int) -> Int64:
    """Return which block positions need logits: `depth` of each block, from `first` on."""
    return np.arange(n * size).reshape(n, -1)[:, first : first + depth].ravel()


def _visible(engine: Engine, length: int) -> int:
    """Return how many cache rows to attend over, rounded up so that few shapes are bound."""
    step = engine.visible_step
    return min(-(-length // step) * step, engine.info.cache_len)


def perform_copies(engine: Engine, copies: list[int]) -> None:
    """Copy what a step asks for; a slot that is freed needs no copy, and may hold anything."""
    for source, destination, tokens, start in parse_copies(copies):
        if destination != FREED or source >= FIRST_BLOCK:
            engine.copy_kv(source, destination, tokens, start)


def committed_logprobs(
    x: VerifyInput, kept: Sequence[Accepted | None], logits: Float32
) -> tuple[Float32, Int64]:
    """Return log-probabilities of committed tokens and of the K best, from unprocessed logits.

    logits `[n, D + 1, vocab]`, or `[1, S, vocab]` for a scored prompt chunk. Returns values and ids
    `[n, D + 1, 1 + K]`, or `[n, 1, 1]` if no row requests them. With `include_drafting` values have
    one more column: each draft's log-probability, NaN after a rejected draft.
    """
    n, scored, _ = logits.shape
    processors = [decode_processor(each) for each in x.sampling.tolist()]
    counts = [each.sampling.logprobs for each in processors]
    drafts = [each.sampling.include_drafting for each in processors]
    most = max((count for count in counts if count is not None), default=None)
    if most is None and not any(drafts):
        return np.zeros((n, 1, 1), np.float32), np.zeros((n, 1, 1), np.int64)
    most = most or 0
    values = np.zeros((n, scored, 1 + most + any(drafts)), np.float32)
    ids = np.zeros((n, scored, 1 + most), np.int64)
    for i, each in enumerate(kept):
        count, token = each or (0, 0)
        if drafts[i]:
            values[i, :, -1] = np.nan
            _score_drafts(x, i, count, logits[i], values[i, :, -1])
        if counts[i] is None:
            continue
        _, known, place, *_ = x.rows[i].tolist()
        tokens = [*x.tokens[i, known : known + count].tolist(), token]
        if processors[i].scores_prompt(place):
            tokens = [*x.tokens[i, 1:].tolist(), token][:known]
        for j, committed in enumerate(tokens):
            line = logits[i, j] - logits[i, j].max()
            line -= np.log(np.exp(line).sum())
            best = np.sort(np.argpartition(-line, max(most - 1, 0))[:most])
            best = best[np.argsort(-line[best], kind="stable")]
            ids[i, j] = [committed, *best.tolist()]
            values[i, j, : 1 + most] = line[ids[i, j]]
    return values, ids


def _score_drafts(x: VerifyInput, i: int, accepted: int, logits: Float32, scores: Float32) -> None:
    """Write log-probabilities of row i's drafts to `scores` `[D + 1]`, draft 1 at place 1."""
    length, known, *_ = x.rows[i].tolist()
    for j, token in enumerate(x.tokens[i, known:length].tolist()[: accepted + 1]):
        most = logits[j].max()
        scores[j + 1] = logits[j, token] - most - np.log(np.exp(logits[j] - most).sum())


def in_process(target: Engine, drafter: Engine | None) -> RunRound:
    """Return rounds on engines of this process; without a drafter the target decodes alone."""
    buffer = None if drafter is None else FeatureBuffer()

    def run(x: VerifyInput) -> RoundOutput:
        checked = verify(target, x, buffer)
        if drafter is None or not needs_drafter(x):
            drafted = no_drafts(len(x.rows))
        else:
            given = DraftInput(x.batch, x.rows, checked.results, checked.features)
            drafted = draft(drafter, given)
        return RoundOutput(
            checked.results, checked.logprobs, checked.logprob_ids, checked.verify_seconds, *drafted
        )

    return run


def needs_drafter(x: VerifyInput) -> bool:
    """Return whether drafts are wanted, or slots or blocks must be copied in the drafter too."""
    copied = (x.batch[4::4] != FREED) | (x.batch[3::4] >= FIRST_BLOCK)
    return bool(x.batch[1] > 0 or copied.any())

"""One round: verify, then draft. The named tuples are also the tensors of the Triton ensemble.

Few tensors and few array operations: at the speed of a small model both count.
"""

import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dflash_trt.decoding.acceptance import accept_greedy, accept_sampled
from dflash_trt.decoding.rules import decode
from dflash_trt.decoding.sampling import propose
from dflash_trt.engines.onnxruntime import Engine

VISIBLE_STEP = 32
NO_HISTORY = -1

Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.object_]


class VerifyInput(NamedTuple):
    """Tokens to check for n sequences, which occupy n cache rows side by side.

    A row's first `forced` tokens are known to be right (a prompt chunk, or the anchor); the rest,
    up to `length`, are drafts. Prefilling is verifying a prompt.
    """

    batch: Int64  # [2 + 2m]: first cache row, drafts wanted at most, then row moves (from, to)
    rows: Int64  # [n, 4]: length 1..S, forced 1..length, position of the first token, budget
    tokens: Int64  # [n, S]
    rules: Bytes  # [n]: `rules.encode`
    uniforms: Float64  # [n, 2k + 1]: k + 1 random numbers to accept with, k to draft with
    history: Int64  # [n, L]: tokens before `tokens` where the rules need them, then -1
    candidate_ids: Int64  # [n, D, k]: what each draft was drawn from; D is 1 if all are greedy
    candidate_probs: Float32  # [n, D, k]


class VerifyOutput(NamedTuple):
    """What the target says."""

    results: Int64  # [n, 2]: drafts kept (-1: the row failed), the target's own token after them
    features: Float32  # [n, S, taps * hidden_size]
    logprobs: Float32  # [n, D + 1, 1 + K]: of each committed token, and of the K best there
    logprob_ids: Int64  # [n, D + 1, K + 1]: the committed token, the K best; [n, 1, 1] if unasked
    verify_seconds: Float64  # [1]


class DraftInput(NamedTuple):
    """Verified features to inject, and the anchor of the next block."""

    batch: Int64
    rows: Int64
    rules: Bytes
    uniforms: Float64
    results: Int64
    features: Float32


class DraftOutput(NamedTuple):
    """The next drafts, and what they were drawn from."""

    drafts: Int64  # [n, D]
    next_candidate_ids: Int64  # [n, D, k]; D is 1 if all are greedy
    next_candidate_probs: Float32
    draft_seconds: Float64  # [1]


class RoundOutput(NamedTuple):
    """What a round returns to the loop: tokens and figures, never features."""

    results: Int64
    logprobs: Float32
    logprob_ids: Int64
    verify_seconds: Float64
    drafts: Int64
    next_candidate_ids: Int64
    next_candidate_probs: Float32
    draft_seconds: Float64


RunRound = Callable[[VerifyInput], RoundOutput]


def verify(engine: Engine, x: VerifyInput) -> VerifyOutput:
    """Run the target over the tokens, write their KV rows and decide how many drafts are kept."""
    start = time.perf_counter()
    first_row, _, *moves = x.batch.tolist()
    _move_rows(engine, moves)
    n, width = x.tokens.shape
    lengths, forced, places, _ = zip(*x.rows.tolist(), strict=True)
    scored = _scored_rows(forced, lengths, width)
    visible = _visible(engine, max(places) + width)
    step = engine.step(first_row, n, width, visible, len(scored))
    step.inputs["tokens"][:] = x.tokens
    step.inputs["positions"][:] = [range(place, place + width) for place in places]
    step.inputs["write_index"][:] = places
    step.inputs["head_rows"][:] = scored
    mask = step.inputs["mask"]
    mask[:] = False
    for i, place in enumerate(places):
        mask[i, :, :, :place] = True
        mask[i, :, :, place : place + width] = _causal(width)
    step.run()
    outputs = step.outputs
    own = outputs["top_ids"].reshape(n, -1).tolist()
    ruled = [i for i, rules in enumerate(x.rules.tolist()) if rules]
    results = [
        accept_greedy(line[forced[i] : lengths[i]], own[i])
        for i, line in enumerate(x.tokens.tolist())
    ]
    logprobs, ids = _no_logprobs(n)
    if ruled:
        logits = outputs["logits"].reshape(n, len(own[0]), -1)
        for i in ruled:
            results[i] = _accept_by_rules(x, i, logits[i])
        logprobs, ids = _logprobs(x, results, logits)
    features = outputs["features"]
    return VerifyOutput(np.array(results), features, logprobs, ids, _seconds_since(start))


def draft(engine: Engine, x: DraftInput) -> DraftOutput:
    """Inject the features and fill one block of masks behind each sequence's new anchor.

    Features of rejected drafts are injected with the others: the mask hides them and the next
    round's features overwrite them.
    """
    start = time.perf_counter()
    first_row, wanted, *moves = x.batch.tolist()
    _move_rows(engine, moves)
    n, width = x.features.shape[:2]
    rows, results, mask_token = x.rows.tolist(), x.results.tolist(), engine.info.mask_token_id
    # the whole block is masked even if fewer drafts are asked for: they are better that way
    masks = [
        min(max(budget - accepted - 1, 0), engine.info.block_size - 1)
        for (_, _, _, budget), (accepted, _) in zip(rows, results, strict=True)
    ]
    if not any(masks) and all(budget for _, _, _, budget in rows):  # all end with this round
        return _no_drafts(n)
    last = max(1, *masks)
    depth = min(last, wanted)
    end = max(place for _, _, place, _ in rows) + width + last + 1
    step = engine.step(first_row, n, last + 1, _visible(engine, end), n * depth, context=width)
    block, positions, mask = [], [], step.inputs["mask"]
    mask[:] = False
    for i, (_, forced, place, _) in enumerate(rows):
        accepted, token = results[i]
        anchor = place + forced + max(accepted, 0)
        block.append([token] + [mask_token] * last)
        positions.append([*range(place, place + width), *range(anchor, anchor + last + 1)])
        mask[i, :, :, :anchor] = True
        # the block's keys stand behind the features'; a row near its end sees fewer masks than the
        # batch has, as if it were alone
        mask[i, :, :, place + width : place + width + masks[i] + 1] = True
    step.inputs["block"][:] = block
    step.inputs["positions"][:] = positions
    step.inputs["write_index"][:] = x.rows[:, 2]
    step.inputs["features"][:] = x.features
    step.inputs["head_rows"][:] = _mask_rows(n, last, depth)
    step.run()
    outputs = step.outputs
    ids = outputs["top_ids"].reshape(n, depth, -1)
    rules = x.rules.tolist()
    samplings = [decode(each).sampling for each in rules] if any(rules) else []
    if not any(sampling.temperature for sampling in samplings):
        return DraftOutput(ids[:, :, 0], *no_candidates(n), _seconds_since(start))
    logits = outputs["top_logits"].reshape(n, depth, -1).tolist()
    # the last `longest` numbers are for drafting, whatever was used of the others
    longest = x.uniforms.shape[1] // 2
    uniforms = x.uniforms[:, longest + 1 :].tolist()
    drafts, probs = np.empty((n, depth), np.int64), np.empty(ids.shape, np.float32)
    for i, line in enumerate(ids.tolist()):
        drawn = [
            propose(best, scores, samplings[i], uniform)
            for best, scores, uniform in zip(line, logits[i], uniforms[i], strict=False)
        ]
        drafts[i], probs[i] = zip(*drawn, strict=True)
    return DraftOutput(drafts, ids.copy(), probs, _seconds_since(start))


def in_process(target: Engine, drafter: Engine | None) -> RunRound:
    """Rounds on engines of this process; without a drafter the target decodes alone."""

    def run(x: VerifyInput) -> RoundOutput:
        checked = verify(target, x)
        if drafter is None:
            drafted = _no_drafts(len(x.rows))
        else:
            drafted = draft(drafter, draft_input(x, checked))
        return RoundOutput(
            checked.results,
            checked.logprobs,
            checked.logprob_ids,
            checked.verify_seconds,
            drafted.drafts,
            drafted.next_candidate_ids,
            drafted.next_candidate_probs,
            drafted.draft_seconds,
        )

    return run


def draft_input(x: VerifyInput, checked: VerifyOutput) -> DraftInput:
    """What the ensemble wires from its inputs and from `verify` into `draft`."""
    return DraftInput(x.batch, x.rows, x.rules, x.uniforms, checked.results, checked.features)


# The parts of a greedy batch that are the same for all batches of its size.


@lru_cache(maxsize=256)
def no_rules(n: int) -> tuple[Bytes, Float64, Int64]:
    """Rules, uniforms and history of n plain greedy rows."""
    return np.full(n, b"", object), np.zeros((n, 1)), np.full((n, 1), NO_HISTORY)


@lru_cache(maxsize=256)
def no_candidates(n: int) -> tuple[Int64, Float32]:
    """Candidate ids and probabilities of n greedy rows."""
    return np.zeros((n, 1, 1), np.int64), np.zeros((n, 1, 1), np.float32)


@lru_cache(maxsize=256)
def _no_logprobs(n: int) -> tuple[Float32, Int64]:
    return np.zeros((n, 1, 1), np.float32), np.zeros((n, 1, 1), np.int64)


def _no_drafts(n: int) -> DraftOutput:
    # one column, so that no tensor of the ensemble is ever empty
    return DraftOutput(np.zeros((n, 1), np.int64), *no_candidates(n), np.zeros(1))


def _accept_by_rules(x: VerifyInput, i: int, logits: Float32) -> tuple[int, int]:
    """`accept_sampled` of row i; (-1, 0) if its logits are no numbers, which hurts this row alone.

    logits `[D + 1, vocab]`, after the anchor and after each draft.
    """
    rules = decode(x.rules[i])
    length, forced, position, _ = x.rows[i].tolist()
    tokens = x.tokens[i, :length].tolist()
    drafts = tokens[forced:]
    history: list[int] = []
    if rules.need_history:
        history = [token for token in x.history[i].tolist() if token != NO_HISTORY]
        history += tokens[:forced]

    def weights(j: int) -> Float32:
        return rules.weights(logits[j], position + forced + j, history + drafts[:j])

    if rules.sampling.temperature == 0:  # a greedy draft is certain, and so is the answer
        ids, probs = [[token] for token in drafts], [[1.0]] * len(drafts)
        uniforms = [0.0] * (len(drafts) + 1)
    else:
        ids, probs = x.candidate_ids[i].tolist(), x.candidate_probs[i].tolist()
        longest = x.uniforms.shape[1] // 2
        uniforms = [*x.uniforms[i, : len(drafts)].tolist(), float(x.uniforms[i, longest])]
    try:
        return accept_sampled(drafts, weights, ids, probs, uniforms)
    except FloatingPointError:
        return -1, 0


def _logprobs(
    x: VerifyInput, results: Sequence[tuple[int, int]], logits: Float32
) -> tuple[Float32, Int64]:
    """Log-probabilities under the target as it is, before any rule, of the committed tokens.

    logits `[n, D + 1, vocab]`.
    """
    n, scored, _ = logits.shape
    asked = [decode(rules).sampling.logprobs for rules in x.rules.tolist()]
    most = max((count for count in asked if count is not None), default=None)
    if most is None:
        return _no_logprobs(n)
    values = np.zeros((n, scored, 1 + most), np.float32)
    ids = np.zeros((n, scored, 1 + most), np.int64)
    for i, (accepted, token) in enumerate(results):
        if asked[i] is None:
            continue
        forced = x.rows[i, 1]
        tokens = [*x.tokens[i, forced : forced + max(accepted, 0)].tolist(), token]
        for j, committed in enumerate(tokens):
            line = logits[i, j] - logits[i, j].max()
            line -= np.log(np.exp(line).sum())
            best = np.argsort(-line, kind="stable")[:most]
            ids[i, j] = [committed, *best.tolist()]
            values[i, j] = line[ids[i, j]]
    return values, ids


@lru_cache(maxsize=64)
def _causal(width: int) -> npt.NDArray[np.bool_]:
    """`[width, width]`: which of the new tokens each of them sees."""
    return np.tri(width, dtype=bool)


@lru_cache(maxsize=1024)
def _scored_rows(forced: tuple[int, ...], lengths: tuple[int, ...], width: int) -> Int64:
    """Which of the n * width tokens need logits, `[n * (1 + most drafts)]`.

    Only a row's last forced token and its drafts do; a shorter row repeats its last token.
    """
    first, last = np.array(forced)[:, None] - 1, np.array(lengths)[:, None] - 1
    offsets = np.minimum(first + np.arange(int((last - first).max()) + 1), last)
    rows: Int64 = (offsets + np.arange(len(forced))[:, None] * width).ravel()
    return rows


@lru_cache(maxsize=256)
def _mask_rows(n: int, last: int, depth: int) -> Int64:
    """Which of the n * (last + 1) block positions need logits: the first masks, no anchor."""
    return np.arange(n * (last + 1)).reshape(n, -1)[:, 1 : depth + 1].ravel()


def _visible(engine: Engine, length: int) -> int:
    """How many cache rows to attend over: few distinct numbers, so that bound steps are reused."""
    return min(-(-length // VISIBLE_STEP) * VISIBLE_STEP, engine.info.cache_len)


def _move_rows(engine: Engine, moves: list[int]) -> None:
    for source, destination in zip(moves[::2], moves[1::2], strict=True):
        engine.move_row(source, destination)


def _seconds_since(start: float) -> Float64:
    return np.array([time.perf_counter() - start])

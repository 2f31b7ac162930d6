"""One round: verify, then draft. The dataclasses are also the tensors of the Triton ensemble."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from dflash_trt.decoding.acceptance import accept_greedy, accept_sampled
from dflash_trt.decoding.sampling import CANDIDATES, Sampling, generator, propose
from dflash_trt.engines.onnxruntime import Engine

VISIBLE_STEP = 32

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class VerifyInput:
    """Tokens to check for n sequences, which occupy the cache rows row .. row+n-1.

    A row's first `forced` tokens are known to be right (a prompt chunk, or the anchor); the rest,
    up to `lengths`, are drafts. Prefilling is verifying a prompt.
    """

    row: Int64  # [1]
    moves: Int64  # [m, 2]: cache rows (from, to) copied in order before the step; (-1, -1) is none
    tokens: Int64  # [n, S]
    lengths: Int64  # [n], 1..S
    forced: Int64  # [n], 1..lengths
    positions: Int64  # [n]: position of tokens[:, 0], the committed length before it
    budget: Int64  # [n]: tokens still wanted; 0 for a prompt chunk that is not the last
    draft_tokens: Int64  # [1]: the most drafts wanted for the next round
    sampling: Float32  # [n, 3]: temperature, top_k, top_p
    seeds: Int64  # [n]
    candidate_ids: Int32  # [n, D, 16]: what each draft was drawn from; D may be 1 if all are greedy
    candidate_probs: Float32  # [n, D, 16]


@dataclass(frozen=True)
class VerifyOutput:
    """What the target says."""

    accepted: Int64  # [n]: drafts kept
    next_tokens: Int64  # [n]: the target's own token after them
    features: Float32  # [n, S, taps * hidden_size]


@dataclass(frozen=True)
class DraftInput:
    """Verified features to inject, and the anchor of the next block."""

    row: Int64
    moves: Int64
    forced: Int64
    positions: Int64
    budget: Int64
    draft_tokens: Int64
    sampling: Float32
    seeds: Int64
    accepted: Int64
    next_tokens: Int64
    features: Float32


@dataclass(frozen=True)
class DraftOutput:
    """The next drafts, `[n, D]`, and the distributions they were drawn from (greedy: zeros)."""

    drafts: Int64
    next_candidate_ids: Int32
    next_candidate_probs: Float32


@dataclass(frozen=True)
class RoundOutput:
    """What a round returns to the loop: tokens and counters, never features."""

    accepted: Int64
    next_tokens: Int64
    drafts: Int64
    next_candidate_ids: Int32
    next_candidate_probs: Float32


RunRound = Callable[[VerifyInput], RoundOutput]


def verify(engine: Engine, x: VerifyInput) -> VerifyOutput:
    """Run the target over the tokens, write their KV rows and decide how many drafts are kept."""
    _move_rows(engine, x.moves)
    n, width = x.tokens.shape
    positions = x.positions[:, None] + _count(width)
    rows = _scored_rows(tuple(x.forced.tolist()), tuple(x.lengths.tolist()), width)
    visible = _visible(engine, max(x.positions.tolist()) + width)
    outputs = engine.run(
        int(x.row[0]),
        {
            "tokens": x.tokens,
            "positions": positions,
            "write_index": x.positions,
            "mask": (_count(visible) <= positions[:, :, None])[:, None],
            "head_rows": rows,
        },
    )
    argmax = outputs["argmax"].reshape(n, -1)
    drafts = x.tokens.ravel()[rows].reshape(n, -1)[:, 1:]
    counts = x.lengths - x.forced
    accepted = accept_greedy(drafts, argmax, counts)
    next_tokens = argmax[_count(n), accepted]
    if sampled := _sampled(x.sampling):
        logits = outputs["logits"].reshape(*argmax.shape, -1)
        for i in sampled:
            accepted[i], next_tokens[i] = accept_sampled(
                drafts[i, : counts[i]],
                logits[i],
                x.candidate_ids[i],
                x.candidate_probs[i],
                _sampling(x.sampling[i], x.seeds[i]),
                generator(int(x.seeds[i]), int(x.positions[i] + x.forced[i]), stage=1),
            )
    return VerifyOutput(accepted, next_tokens, outputs["features"])


def draft(engine: Engine, x: DraftInput) -> DraftOutput:
    """Inject the features and fill one block of masks behind each sequence's new anchor.

    Features of rejected drafts are injected with the others: the mask hides them and the next
    round's features overwrite them.
    """
    _move_rows(engine, x.moves)
    n, width = x.features.shape[:2]
    longest, budgets, accepted = engine.info.block_size - 1, x.budget.tolist(), x.accepted.tolist()
    # the whole block is masked even if fewer drafts are asked for: they are better that way
    masks = [min(max(b - a - 1, 0), longest) for b, a in zip(budgets, accepted, strict=True)]
    if not any(masks) and all(budgets):  # every sequence ends with this round
        return _no_drafts(n)
    last = max(1, *masks)
    depth = min(last, int(x.draft_tokens[0]))
    anchors = x.positions + x.forced + x.accepted
    block = np.full((n, last + 1), engine.info.mask_token_id)
    block[:, 0] = x.next_tokens
    # the block's keys stand behind the features'
    starts = [position + width for position in x.positions.tolist()]
    seen = np.zeros((n, 1, last + 1, _visible(engine, max(starts) + last + 1)), bool)
    for i, anchor in enumerate(anchors.tolist()):
        seen[i, :, :, :anchor] = True
        # a row near its end sees fewer masks than the batch has, as if it were alone
        seen[i, :, :, starts[i] : starts[i] + masks[i] + 1] = True
    positions = np.empty((n, width + last + 1), np.int64)
    np.add(x.positions[:, None], _count(width), out=positions[:, :width])
    np.add(anchors[:, None], _count(last + 1), out=positions[:, width:])
    outputs = engine.run(
        int(x.row[0]),
        {
            "features": x.features,
            "block": block,
            "positions": positions,
            "write_index": x.positions,
            "mask": seen,
            "head_rows": _mask_rows(n, last, depth),
        },
    )
    drafts = outputs["argmax"].reshape(n, depth).copy()
    sampled = _sampled(x.sampling)
    if not sampled:
        return DraftOutput(drafts, *no_candidates(n, 1))
    ids, probs = no_candidates(n, depth)
    logits = outputs["logits"].reshape(n, depth, -1)
    for i in sampled:
        sampling = _sampling(x.sampling[i], x.seeds[i])
        rng = generator(sampling.seed, int(anchors[i]), stage=0)
        drafts[i], ids[i], probs[i] = propose(logits[i], sampling, rng)
    return DraftOutput(drafts, ids, probs)


def no_candidates(n: int, depth: int) -> tuple[Int32, Float32]:
    """Empty candidate ids and probabilities `[n, depth, 16]`: what greedy drafts are drawn from."""
    shape = (n, depth, CANDIDATES)
    return np.zeros(shape, np.int32), np.zeros(shape, np.float32)


def in_process(target: Engine, drafter: Engine | None) -> RunRound:
    """Rounds on engines of this process; without a drafter the target decodes alone."""

    def run(x: VerifyInput) -> RoundOutput:
        checked = verify(target, x)
        if drafter is None:
            drafted = _no_drafts(len(x.tokens))
        else:
            drafted = draft(drafter, draft_input(x, checked))
        return RoundOutput(
            checked.accepted,
            checked.next_tokens,
            drafted.drafts,
            drafted.next_candidate_ids,
            drafted.next_candidate_probs,
        )

    return run


def draft_input(x: VerifyInput, checked: VerifyOutput) -> DraftInput:
    """What the ensemble wires from its inputs and from `verify` into `draft`."""
    return DraftInput(
        row=x.row,
        moves=x.moves,
        forced=x.forced,
        positions=x.positions,
        budget=x.budget,
        draft_tokens=x.draft_tokens,
        sampling=x.sampling,
        seeds=x.seeds,
        accepted=checked.accepted,
        next_tokens=checked.next_tokens,
        features=checked.features,
    )


def _no_drafts(n: int) -> DraftOutput:
    # one column, so that no tensor of the ensemble is ever empty
    return DraftOutput(np.zeros((n, 1), np.int64), *no_candidates(n, 1))


@lru_cache(maxsize=1024)
def _count(length: int) -> Int64:
    """0, 1, .. length-1."""
    return np.arange(length)


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


def _move_rows(engine: Engine, moves: Int64) -> None:
    for source, destination in moves.tolist():
        if source >= 0:
            engine.move_row(source, destination)


def _sampled(sampling: Float32) -> list[int]:
    """The rows with a temperature."""
    return [i for i, temperature in enumerate(sampling[:, 0].tolist()) if temperature]


def _sampling(row: Float32, seed: np.int64) -> Sampling:
    return Sampling(float(row[0]), int(row[1]), float(row[2]), int(seed))

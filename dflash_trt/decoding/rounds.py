"""One round: verify, then draft.

Few array operations: after an engine call they run cold, and a small model's round is short.
"""

import time
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from dflash_trt.decoding.acceptance import accept_by_rules, accept_greedy
from dflash_trt.decoding.logprobs import committed_logprobs, no_logprobs
from dflash_trt.decoding.messages import (
    NO_DRAFT,
    DraftInput,
    DraftOutput,
    Int64,
    RoundOutput,
    RunRound,
    VerifyInput,
    VerifyOutput,
    no_candidates,
)
from dflash_trt.decoding.path import best_path, draw_path
from dflash_trt.decoding.rules import decode
from dflash_trt.decoding.sampling import propose
from dflash_trt.engines.step import Engine


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
    logprobs, ids = no_logprobs(n)
    if ruled:
        logits = outputs["logits"].reshape(n, len(own[0]), -1)
        for i in ruled:
            results[i] = accept_by_rules(x, i, logits[i])
        logprobs, ids = committed_logprobs(x, results, logits)
    features = outputs["features"]
    return VerifyOutput(np.array(results), features, logprobs, ids, time.perf_counter() - start)


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
    # the whole block is filled even if fewer drafts are asked for: they are better that way
    depths = [
        min(max(budget - accepted - 1, 0), engine.info.block_size - 1)
        for (_, _, _, budget), (accepted, _) in zip(rows, results, strict=True)
    ]
    if not any(depths) and all(budget for _, _, _, budget in rows):  # all end with this round
        return no_drafts(n)
    deepest = max(1, *depths)
    depth = min(deepest, wanted)
    first = 0 if engine.info.sample_from_anchor else 1  # which row of a block is the first draft's
    size = first + deepest
    end = max(place for _, _, place, _ in rows) + width + size
    step = engine.step(first_row, n, size, _visible(engine, end), n * depth, context=width)
    block, positions, mask = [], [], step.inputs["mask"]
    mask[:] = False
    for i, (_, forced, place, _) in enumerate(rows):
        accepted, token = results[i]
        anchor = place + forced + max(accepted, 0)
        block.append([token] + [mask_token] * (size - 1))
        positions.append([*range(place, place + width), *range(anchor, anchor + size)])
        mask[i, :, :, :anchor] = True
        # the block's keys stand behind the features'; a row near its end sees fewer masks than the
        # batch has, as if it were alone
        mask[i, :, :, place + width : place + width + first + depths[i]] = True
    step.inputs["block"][:] = block
    step.inputs["positions"][:] = positions
    step.inputs["write_index"][:] = x.rows[:, 2]
    step.inputs["features"][:] = x.features
    step.inputs["head_rows"][:] = _draft_rows(n, size, first, depth)
    step.run()
    outputs = step.outputs
    ids = outputs["top_ids"].reshape(n, depth, -1)
    pairs = outputs.get("pair_scores")
    if pairs is not None:
        pairs = pairs.reshape(*ids.shape, -1)
    rules = x.rules.tolist()
    samplings = [decode(each).sampling for each in rules] if any(rules) else []
    if not any(sampling.temperature for sampling in samplings):
        best = ids[:, :, 0] if pairs is None else best_path(ids, pairs)
        return DraftOutput(best, *no_candidates(n), time.perf_counter() - start)
    logits = outputs["top_logits"].reshape(n, depth, -1).tolist()
    # the last `longest` numbers are for drafting, whatever was used of the others
    longest = x.uniforms.shape[1] // 2
    uniforms = x.uniforms[:, longest + 1 :].tolist()
    drafts, probs = np.empty((n, depth), np.int64), np.empty(ids.shape, np.float32)
    for i, line in enumerate(ids.tolist()):
        if pairs is None:
            drawn = [
                propose(best, scores, samplings[i], uniform)
                for best, scores, uniform in zip(line, logits[i], uniforms[i], strict=False)
            ]
        else:
            drawn = draw_path(line, pairs[i], samplings[i], uniforms[i])
        drafts[i], probs[i] = zip(*drawn, strict=True)
    return DraftOutput(drafts, ids.copy(), probs, time.perf_counter() - start)


Propose = Callable[[VerifyInput, VerifyOutput], DraftOutput]
"""What drafts behind the verified tokens. See `DraftOutput`."""


def in_process(target: Engine, drafter: Engine | None) -> RunRound:
    """Rounds on engines of this process; without a drafter the target decodes alone."""

    def propose(x: VerifyInput, checked: VerifyOutput) -> DraftOutput:
        return draft(drafter, draft_input(x, checked)) if drafter else no_drafts(len(x.rows))

    return rounds_with(target, propose)


def rounds_with(target: Engine, propose: Propose) -> RunRound:
    """Rounds on a target of this process and whatever drafts for it."""

    def run(x: VerifyInput) -> RoundOutput:
        checked = verify(target, x)
        drafted = propose(x, checked)
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


def no_drafts(n: int) -> DraftOutput:
    """Of a target that decodes alone, or of rows that are still being prefilled."""
    # one column, so that no tensor of the ensemble is ever empty
    return DraftOutput(np.full((n, 1), NO_DRAFT), *no_candidates(n), 0.0)


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
def _draft_rows(n: int, size: int, first: int, depth: int) -> Int64:
    """Which of the n * size block positions need logits: `depth` of each block, from `first` on."""
    return np.arange(n * size).reshape(n, -1)[:, first : first + depth].ravel()


def _visible(engine: Engine, length: int) -> int:
    """How many cache rows to attend over: few distinct numbers, so that bound steps are reused."""
    step = engine.visible_step
    return min(-(-length // step) * step, engine.info.cache_len)


def _move_rows(engine: Engine, moves: list[int]) -> None:
    for source, destination in zip(moves[::2], moves[1::2], strict=True):
        engine.move_row(source, destination)

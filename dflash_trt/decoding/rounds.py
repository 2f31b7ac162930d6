"""One round: verify, then draft.

Few array operations: after an engine call they run cold, and a small model's round is short.
"""

import time
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from dflash_trt.decoding.acceptance import accept_by_rules, accept_greedy
from dflash_trt.decoding.coupling import NO_TOKEN
from dflash_trt.decoding.logprobs import committed_logprobs, no_logprobs
from dflash_trt.decoding.messages import (
    FORGOTTEN,
    NO_DRAFT,
    DraftInput,
    DraftOutput,
    Float32,
    Int64,
    RoundOutput,
    RunRound,
    VerifyInput,
    VerifyOutput,
    moves_of,
    no_candidates,
)
from dflash_trt.decoding.rules import decode
from dflash_trt.decoding.speculation import FeatureBuffer, ancestors, depths
from dflash_trt.engines.step import NOTHING, Engine


def verify(engine: Engine, x: VerifyInput, held: FeatureBuffer | None = None) -> VerifyOutput:
    """Run the target over the tokens, write their KV rows and decide how many drafts are kept.

    held: where features stay while no drafts are wanted.
    """
    start = time.perf_counter()
    first_row, _, _, *moves = x.batch.tolist()
    _move_rows(engine, moves)
    n, asked = x.tokens.shape
    width = max(asked, -(-engine.info.least_rows // n))
    lengths, forced, places, _ = zip(*x.rows.tolist(), strict=True)
    trees = [tuple(line[1:]) for line in x.parents.tolist()] if x.parents.shape[1] > 1 else []
    all_scored = n == 1 and decode(x.rules[0]).score_prompt(places[0])
    before = forced[0] - 1 if all_scored else 0  # scored rows before the last forced token's
    scored = _scored_rows((1,) if all_scored else forced, lengths, width, engine.info.least_rows)
    visible = _visible(engine, max(places) + width)
    step = engine.step(first_row, n, width, visible, len(scored))
    step.inputs["tokens"][:, :asked] = x.tokens
    step.inputs["tokens"][:, asked:] = 0
    positions: list[Sequence[int]] = [range(place, place + width) for place in places]
    if trees:
        positions = [
            [place + depth for depth in depths(parents)]
            for place, parents in zip(places, trees, strict=True)
        ]
    step.inputs["positions"][:] = positions
    step.inputs["write_index"][:] = places
    step.inputs["head_rows"][:] = scored
    mask = step.inputs["mask"]
    mask[:] = False
    for i, place in enumerate(places):
        mask[i, :, :, :place] = True
        seen = ancestors(trees[i]) if trees else _causal(width)
        mask[i, :, :, place : place + width] = seen
    step.run()
    outputs = step.outputs
    numbers = np.isfinite(outputs["top_logits"])
    own = np.where(numbers, outputs["top_ids"], NO_TOKEN).reshape(n, -1)[:, before:].tolist()
    features = outputs["features"][:, :asked]
    logprobs, ids = no_logprobs(n)
    if trees or any(x.rules.tolist()):
        logits = outputs["logits"].reshape(n, before + len(own[0]), -1)
        kept = accept_by_rules(x, own, logits[:, before:])
        results = [[len(each[0]), each[1]] if each else [-1, 0] for each in kept]
        logprobs, ids = committed_logprobs(x, [each or ((), 0) for each in kept], logits)
        if trees:
            most = max(accepted for accepted, _ in results)
            for i, each in enumerate(kept):
                path = list(each[0]) if each else []
                _keep(engine, first_row + i, places[i], path, features[i])
                results[i] += path + [0] * (most - len(path))
    else:
        results = [
            [*accept_greedy(line[forced[i] : lengths[i]], own[i])]
            for i, line in enumerate(x.tokens.tolist())
        ]
        results = [[-1, 0] if token == NO_TOKEN else [kept, token] for kept, token in results]
    _clear_failed(engine, first_row, results)
    older = [0] * n
    if held is not None:
        features, older = held.pass_on(x, [accepted for accepted, *_ in results], features)
    for result, count in zip(results, older, strict=True):
        result.insert(2, count)
    return VerifyOutput(np.array(results), features, logprobs, ids, time.perf_counter() - start)


def _clear_failed(engine: Engine, first_row: int, results: Sequence[Sequence[int]]) -> None:
    """What has no finite logits may have left entries that are no numbers, for the row's next."""
    for i, (accepted, *_) in enumerate(results):
        if accepted < 0:
            engine.move_row(NOTHING, first_row + i, engine.info.cache_len)


def _keep(engine: Engine, row: int, place: int, path: list[int], features: Float32) -> None:
    """What was kept of a tree moves to the front, behind the anchor."""
    if path != list(range(1, len(path) + 1)):
        engine.keep_tokens(row, place + 1, [node - 1 for node in path])
        features[1 : 1 + len(path)] = features[path]


def draft(engine: Engine, x: DraftInput) -> DraftOutput:
    """Inject the features and fill one block of masks behind each sequence's new anchor.

    Features of rejected drafts are injected with the others: the mask hides them and the next
    round's features overwrite them.
    """
    start = time.perf_counter()
    first_row, wanted, candidates, *moves = x.batch.tolist()
    _move_rows(engine, moves)
    n, width = x.features.shape[:2]
    if wanted <= 0:  # the features are held back, or dropped
        return no_drafts(n)
    rows, results, mask_token = x.rows.tolist(), x.results.tolist(), engine.info.mask_token_id
    older: list[int] = x.results[:, 2].tolist()
    # the whole block is filled even if fewer drafts are asked for: they are better that way
    lengths = [
        min(max(budget - accepted - 1, 0), engine.info.block_size - 1)
        for (_, _, _, budget), (accepted, *_) in zip(rows, results, strict=True)
    ]
    if not any(lengths) and all(budget for _, _, _, budget in rows):  # all end with this round
        return no_drafts(n)
    deepest = max(1, *lengths)
    depth = min(deepest, wanted)
    first = 0 if engine.info.sample_from_anchor else 1  # which row of a block is the first draft's
    size = first + deepest
    starts = [place - count for (_, _, place, _), count in zip(rows, older, strict=True)]
    end = max(starts) + width + size
    step = engine.step(first_row, n, size, _visible(engine, end), n * depth, context=width)
    block, positions, mask = [], [], step.inputs["mask"]
    mask[:] = False
    for i, ((_, forced, place, _), start_at) in enumerate(zip(rows, starts, strict=True)):
        accepted, token, *_ = results[i]
        anchor = place + forced + max(accepted, 0)
        block.append([token] + [mask_token] * (size - 1))
        positions.append([*range(start_at, start_at + width), *range(anchor, anchor + size)])
        mask[i, :, :, :anchor] = True
        # the block's keys stand behind the features'; a row near its end sees fewer masks than the
        # batch has, as if it were alone
        mask[i, :, :, start_at + width : start_at + width + first + lengths[i]] = True
    step.inputs["block"][:] = block
    step.inputs["positions"][:] = positions
    step.inputs["write_index"][:] = starts
    step.inputs["features"][:] = x.features
    step.inputs["head_rows"][:] = _draft_rows(n, size, first, depth)
    step.run()
    _clear_failed(engine, first_row, results)
    outputs = step.outputs
    ids = outputs["top_ids"].reshape(n, depth, -1)
    pairs = outputs.get("pair_scores")
    if pairs is not None:
        pairs = pairs.reshape(*ids.shape, -1)
    best = outputs["top_logits"].reshape(n, depth, -1) if pairs is None else pairs
    probs = _probabilities(best, candidates).reshape(n, depth, -1)
    ids = ids[:, :, :candidates].copy()
    return DraftOutput(ids[:, :, 0], ids, probs, time.perf_counter() - start)


Propose = Callable[[VerifyInput, VerifyOutput], DraftOutput]
"""What drafts behind the verified tokens. See `DraftOutput`."""


def in_process(target: Engine, drafter: Engine | None) -> RunRound:
    """Rounds on engines of this process; without a drafter the target decodes alone."""
    held = None if drafter is None else FeatureBuffer()

    def propose(x: VerifyInput, checked: VerifyOutput) -> DraftOutput:
        if drafter is None or not needs_drafter(x):
            return no_drafts(len(x.rows))
        return draft(drafter, draft_input(x, checked))

    return rounds_with(target, propose, held)


def needs_drafter(x: VerifyInput) -> bool:
    """Whether drafts are wanted, or cache rows move, the drafter's with the target's."""
    return bool(x.batch[1] > 0 or (x.batch[4::3] != FORGOTTEN).any())


def rounds_with(target: Engine, propose: Propose, held: FeatureBuffer | None = None) -> RunRound:
    """Rounds on a target of this process and whatever drafts for it; held: see `verify`."""

    def run(x: VerifyInput) -> RoundOutput:
        checked = verify(target, x, held)
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


def _probabilities(logits: Float32, candidates: int) -> Float32:
    """Of the first candidates, from the logits `[..., k]` of the best ones, at temperature 1.

    `[..., k, k]`, of pairs, keep their second axis up to `candidates` too.
    """
    if logits.ndim == 4:
        logits = logits[:, :, :candidates]
    probs: Float32 = np.exp(logits - logits.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    return probs[..., :candidates]


@lru_cache(maxsize=64)
def _causal(width: int) -> npt.NDArray[np.bool_]:
    """`[width, width]`: which of the new tokens each of them sees."""
    return np.tri(width, dtype=bool)


@lru_cache(maxsize=1024)
def _scored_rows(
    forced: tuple[int, ...], lengths: tuple[int, ...], width: int, least: int
) -> Int64:
    """Which of the n * width tokens need logits, `[n * (1 + most drafts)]`, or `least` if more.

    Only a row's last forced token and its drafts do; a shorter row repeats its last token.
    """
    first, last = np.array(forced)[:, None] - 1, np.array(lengths)[:, None] - 1
    offsets = np.minimum(first + np.arange(int((last - first).max()) + 1), last)
    rows: Int64 = (offsets + np.arange(len(forced))[:, None] * width).ravel()
    return np.resize(rows, max(rows.size, least))


@lru_cache(maxsize=256)
def _draft_rows(n: int, size: int, first: int, depth: int) -> Int64:
    """Which of the n * size block positions need logits: `depth` of each block, from `first` on."""
    return np.arange(n * size).reshape(n, -1)[:, first : first + depth].ravel()


def _visible(engine: Engine, length: int) -> int:
    """How many cache rows to attend over: few distinct numbers, so that bound steps are reused."""
    step = engine.visible_step
    return min(-(-length // step) * step, engine.info.cache_len)


def _move_rows(engine: Engine, moves: list[int]) -> None:
    for source, destination, tokens in moves_of(moves):
        if destination != FORGOTTEN:
            engine.move_row(source, destination, tokens)

"""Drafts that depend on one another: a path through candidates, by scores of pairs."""

from collections.abc import Sequence

import numpy as np

from dflash_trt.decoding.sampling import Float32, Float64, Int64, Sampling, propose


def best_path(ids: Int64, scores: Float32) -> Int64:
    """Greedy drafts `[n, D]`, place after place the candidate that best follows the one taken.

    ids `[n, D, k]`; scores `[n, D, k, k]`: of candidate j if candidate i is taken before. The first
    place is behind the anchor, so that all its i are alike.
    """
    return np.array([best_chain(*row)[0] for row in zip(ids, scores, strict=True)])


def best_chain(ids: Int64, scores: Float32) -> tuple[list[int], list[float]]:
    """One sequence's drafts, place after place the best behind the one taken, and their scores.

    ids `[D, k]`; scores `[D, k, k]` as in `best_path`, or `[D, 1, k]` where no candidate depends
    on the one before.
    """
    tokens, highest, taken = [], [], 0
    lines = zip(ids.tolist(), scores.argmax(-1).tolist(), scores.max(-1).tolist(), strict=True)
    for candidates, best, score in lines:
        taken = min(taken, len(best) - 1)
        highest.append(score[taken])
        taken = best[taken]
        tokens.append(candidates[taken])
    return tokens, highest


def draw_paths(
    ids: Int64, scores: Float32, samplings: Sequence[Sampling], uniforms: Float64
) -> tuple[Int64, Float32]:
    """Drafts `[n, D]`, and the probabilities `[n, D, k]` that each of them was drawn with.

    ids and scores as in `best_path`; uniforms of [0, 1) `[n, D]`. The requests' cuts apply too
    (z-lab's selector knows the temperature only): nearer to what the target draws from, and as
    exact, since a draft's own distribution is what it is checked with.
    """
    order = (-scores).argsort(-1, kind="stable")
    # behind each candidate that may be taken before
    drawn, ranked = propose(np.take_along_axis(scores, order, -1), samplings, uniforms[..., None])
    chosen = np.take_along_axis(order, drawn[..., None], -1)[..., 0].tolist()
    paths = []
    for row in chosen:
        path = [0]
        for line in row:
            path.append(line[path[-1]])
        paths.append(path)
    before, taken = np.array(paths)[:, :-1, None], np.array(paths)[:, 1:, None]
    by_candidate = np.empty_like(ranked)
    np.put_along_axis(by_candidate, order, ranked, -1)
    probs = np.take_along_axis(by_candidate, before[..., None], 2)[:, :, 0]
    return np.take_along_axis(ids, taken, -1)[..., 0], probs

"""Drafts that depend on one another: a path through candidates, by scores of pairs."""

from collections.abc import Sequence

import numpy as np

from dflash_trt.decoding.sampling import Float32, Int64, Sampling, propose


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


def draw_path(
    ids: Sequence[Sequence[int]],
    scores: Float32,
    sampling: Sampling,
    uniforms: Sequence[float],
) -> list[tuple[int, list[float]]]:
    """One sequence's drafts, each with the k probabilities that it was drawn with.

    ids `[D, k]` and scores `[D, k, k]` as in `best_path`; a uniform of [0, 1) for each place. The
    request's cuts apply too (z-lab's selector knows the temperature only): nearer to what the
    target draws from, and as exact, since a draft's own distribution is what it is checked with.
    """
    drawn = []
    taken = 0
    for place, (candidates, uniform) in enumerate(zip(ids, uniforms, strict=False)):
        line = scores[place, taken].tolist()
        order = sorted(range(len(line)), key=line.__getitem__, reverse=True)
        ranked = [candidates[i] for i in order], [line[i] for i in order]
        draft, probs = propose(*ranked, sampling, uniform)
        by_candidate = dict(zip(order, probs, strict=True))
        drawn.append((draft, [by_candidate[i] for i in range(len(line))]))
        taken = candidates.index(draft)
    return drawn

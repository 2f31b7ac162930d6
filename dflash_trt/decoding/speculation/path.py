"""Drafts that depend on one another: a path through candidates, by scores of pairs."""

from dflash_trt.decoding.messages import Float32, Int64


def best_chain(ids: Int64, scores: Float32) -> tuple[list[int], list[float]]:
    """One sequence's drafts, place after place the best behind the one taken, and their scores.

    ids `[D, k]`; scores `[D, k, k]`: of candidate j if candidate i is taken before, all i alike at
    the first place; or `[D, 1, k]` where no candidate depends on the one before.
    """
    tokens, highest, taken = [], [], 0
    lines = zip(ids.tolist(), scores.argmax(-1).tolist(), scores.max(-1).tolist(), strict=True)
    for candidates, best, score in lines:
        taken = min(taken, len(best) - 1)
        highest.append(score[taken])
        taken = best[taken]
        tokens.append(candidates[taken])
    return tokens, highest

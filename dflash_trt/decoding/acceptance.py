"""Which drafts the target keeps. Both rules leave the target's own output unchanged."""

import math
from collections.abc import Callable, Sequence

from dflash_trt.decoding.sampling import Float32, draw


def accept_greedy(drafts: Sequence[int], own: Sequence[int]) -> tuple[int, int]:
    """How many leading drafts are the target's own choice, and its token after them.

    own: the target's token after the anchor and after each draft, one more than drafts.
    """
    kept = 0
    while kept < len(drafts) and drafts[kept] == own[kept]:
        kept += 1
    return kept, own[kept]


def accept_sampled(
    drafts: Sequence[int],
    weights: Callable[[int], Float32],
    candidate_ids: Sequence[Sequence[int]],
    candidate_probs: Sequence[Sequence[float]],
    uniforms: Sequence[float],
) -> tuple[int, int]:
    """Rejection sampling: how many drafts of one sequence are kept, and the token after them.

    weights(j) `[vocab]` is in proportion to the target's distribution p after the first j drafts;
    draft j was drawn from q, candidate_probs[j] `[k]` over candidate_ids[j] `[k]`; uniforms are of
    [0, 1), one more than drafts. Draft j is kept with probability min(1, p_j / q_j); the first one
    rejected is replaced by a draw from max(p - q, 0), so that the committed tokens follow p.
    FloatingPointError when the weights are no numbers.
    """
    for j, draft in enumerate(drafts):
        p, ids, probs = weights(j), candidate_ids[j], candidate_probs[j]
        total = float(p.sum())
        if not math.isfinite(total):
            raise FloatingPointError
        if uniforms[j] * probs[ids.index(draft)] * total < p[draft]:
            continue
        of_candidates = p[ids].tolist()
        p[ids] = [max(0.0, a - q * total) for a, q in zip(of_candidates, probs, strict=True)]
        token = draw(p, uniforms[-1])
        if token is None:  # p == q up to rounding leaves nothing; then p itself is drawn from
            p[ids] = of_candidates
            token = draw(p, uniforms[-1])
        return j, token or 0
    return len(drafts), draw(weights(len(drafts)), uniforms[-1]) or 0

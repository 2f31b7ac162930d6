"""Which drafts the target keeps. Both rules leave the target's own output unchanged."""

import math
from collections.abc import Callable, Sequence

from dflash_trt.decoding.messages import NO_HISTORY, VerifyInput
from dflash_trt.decoding.rules import decode
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


def accept_by_rules(x: VerifyInput, i: int, logits: Float32) -> tuple[int, int]:
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

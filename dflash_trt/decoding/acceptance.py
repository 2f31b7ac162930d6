"""Which drafts the target keeps. All rules leave the target's own output unchanged."""

import math
from collections.abc import Callable, Sequence

from dflash_trt.decoding.coupling import choose
from dflash_trt.decoding.messages import NO_HISTORY, VerifyInput
from dflash_trt.decoding.rules import decode
from dflash_trt.decoding.sampling import Float32, draw
from dflash_trt.decoding.tree import walk


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


def accept_by_rules(x: VerifyInput, i: int, logits: Float32) -> tuple[Sequence[int], int]:
    """Which drafts of row i are kept (1: the first), and the target's token after them.

    logits `[D + 1, vocab]`, after the anchor and after each draft. With random numbers in `x` they
    are a chain that was drawn, to be accepted by `accept_sampled`; without, the target's token at
    each place is certain, and drafts are kept that are it. FloatingPointError when the logits are
    no numbers.
    """
    rules = decode(x.rules[i])
    length, forced, position, _ = x.rows[i].tolist()
    tokens = x.tokens[i, :length].tolist()
    history: list[int] = []
    if rules.need_history:
        history = [token for token in x.history[i].tolist() if token != NO_HISTORY]
        history += tokens[:forced]
    drafts, place = tokens[forced:], position + forced
    seed, longest = rules.sampling.seed, x.uniforms.shape[1] // 2
    if longest and rules.sampling.temperature:
        ids, probs = x.candidate_ids[i].tolist(), x.candidate_probs[i].tolist()
        uniforms = [*x.uniforms[i, : len(drafts)].tolist(), float(x.uniforms[i, longest])]
        kept, token = accept_sampled(
            drafts,
            lambda j: rules.weights(logits[j], place + j, history + drafts[:j]),
            ids,
            probs,
            uniforms,
        )
        return range(1, kept + 1), token

    def own(path: Sequence[int]) -> int:
        j = path[-1] if path else 0
        before = history + [drafts[node - 1] for node in path]
        return choose(rules.weights(logits[j], place + len(path), before), seed, place + len(path))

    return walk(drafts, parents_of(x, i), own)


def accept_tree(x: VerifyInput, i: int, own: Sequence[int]) -> tuple[Sequence[int], int]:
    """As `accept_by_rules`, of a greedy row: own is the target's token after each token."""
    drafts = x.tokens[i, 1 : x.rows[i, 0]].tolist()
    return walk(drafts, parents_of(x, i), lambda path: own[path[-1] if path else 0])


def parents_of(x: VerifyInput, i: int) -> Sequence[int]:
    """Of row i's drafts, each one's parent: 0 is the anchor, 1 the first draft."""
    length, forced, _, _ = x.rows[i].tolist()
    if x.parents.shape[1] == 1:
        return range(length - forced)
    parents: list[int] = x.parents[i, 1:length].tolist()
    return parents

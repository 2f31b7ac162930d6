"""Which drafts the target keeps. Both rules leave the target's own output unchanged."""

import numpy as np
import numpy.typing as npt

from dflash_trt.decoding.sampling import Floats, Ints, Sampling, distribution, draw

Int64 = npt.NDArray[np.int64]


def accept_greedy(drafts: Int64, argmax: Int64, counts: Int64) -> Int64:
    """Accepted drafts per sequence: the leading ones that are the target's own choice.

    drafts `[n, D]`; argmax `[n, D+1]`, the target's token after the anchor and after each draft;
    counts `[n]`, how many of a row's drafts are real. Returns `[n]`.
    """
    accepted = []
    # a few short rows: quicker than the same in numpy
    for row, own, count in zip(drafts.tolist(), argmax.tolist(), counts.tolist(), strict=True):
        accepted.append(next((i for i in range(count) if row[i] != own[i]), count))
    return np.array(accepted)


def accept_sampled(
    drafts: Ints,
    logits: Floats,
    candidate_ids: Ints,
    candidate_probs: Floats,
    sampling: Sampling,
    rng: np.random.Generator,
) -> tuple[int, int]:
    """Rejection sampling: how many drafts of one sequence are kept, and the token after them.

    drafts `[D]`, drawn from candidate_probs `[D, 16]` over candidate_ids `[D, 16]`; logits
    `[D+1, vocab]` of the target. Draft i is kept with probability min(1, p_i / q_i); the first
    one rejected is replaced by a draw from max(p - q, 0), so that the committed tokens follow p.
    """
    count = len(drafts)
    p = distribution(logits[: count + 1], sampling)
    q = np.where(candidate_ids[:count] == drafts[:, None], candidate_probs[:count], 0.0).sum(
        axis=-1
    )
    rejected = rng.random(count) * q >= p[np.arange(count), drafts]
    if not rejected.any():
        return count, int(draw(p[count], rng))
    first = int(rejected.argmax())
    residual = p[first].copy()
    np.subtract.at(residual, candidate_ids[first], candidate_probs[first])
    residual = np.maximum(residual, 0.0)
    # p == q up to rounding leaves no residual; then p itself is the distribution
    return first, int(draw(residual if residual.any() else p[first], rng))

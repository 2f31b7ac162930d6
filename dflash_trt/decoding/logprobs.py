"""Log-probabilities of committed tokens, for the rows that ask for them."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from dflash_trt.decoding.messages import Float32, Int64, VerifyInput
from dflash_trt.decoding.rules import decode


def committed_logprobs(
    x: VerifyInput, results: Sequence[tuple[int, int]], logits: Float32
) -> tuple[Float32, Int64]:
    """Log-probabilities under the target as it is, before any rule, of the committed tokens.

    logits `[n, D + 1, vocab]`.
    """
    n, scored, _ = logits.shape
    asked = [decode(rules).sampling.logprobs for rules in x.rules.tolist()]
    most = max((count for count in asked if count is not None), default=None)
    if most is None:
        return no_logprobs(n)
    values = np.zeros((n, scored, 1 + most), np.float32)
    ids = np.zeros((n, scored, 1 + most), np.int64)
    for i, (accepted, token) in enumerate(results):
        if asked[i] is None:
            continue
        forced = x.rows[i, 1]
        tokens = [*x.tokens[i, forced : forced + max(accepted, 0)].tolist(), token]
        for j, committed in enumerate(tokens):
            line = logits[i, j] - logits[i, j].max()
            line -= np.log(np.exp(line).sum())
            best = np.argsort(-line, kind="stable")[:most]
            ids[i, j] = [committed, *best.tolist()]
            values[i, j] = line[ids[i, j]]
    return values, ids


@lru_cache(maxsize=256)
def no_logprobs(n: int) -> tuple[Float32, Int64]:
    """What a batch gets of which no row asks."""
    return np.zeros((n, 1, 1), np.float32), np.zeros((n, 1, 1), np.int64)

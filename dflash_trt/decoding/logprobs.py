"""Log-probabilities of committed tokens, for the rows that ask for them."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from dflash_trt.decoding.messages import Float32, Int64, VerifyInput
from dflash_trt.decoding.rules import decode


def committed_logprobs(
    x: VerifyInput, kept: Sequence[tuple[Sequence[int], int]], logits: Float32
) -> tuple[Float32, Int64]:
    """Log-probabilities under the target as it is, before any rule, of the committed tokens.

    kept: of each row, which drafts were (1: the first) and the token after them; logits
    `[n, D + 1, vocab]`.
    """
    n, scored, _ = logits.shape
    asked = [decode(rules).sampling.logprobs for rules in x.rules.tolist()]
    most = max((count for count in asked if count is not None), default=None)
    if most is None:
        return no_logprobs(n)
    values = np.zeros((n, scored, 1 + most), np.float32)
    ids = np.zeros((n, scored, 1 + most), np.int64)
    for i, (path, token) in enumerate(kept):
        if asked[i] is None:
            continue
        before = x.rows[i, 1] - 1
        tokens = [*(int(x.tokens[i, before + node]) for node in path), token]
        for j, (node, committed) in enumerate(zip((0, *path), tokens, strict=True)):
            line = logits[i, node] - logits[i, node].max()
            line -= np.log(np.exp(line).sum())
            best = np.argsort(-line, kind="stable")[:most]
            ids[i, j] = [committed, *best.tolist()]
            values[i, j] = line[ids[i, j]]
    return values, ids


@lru_cache(maxsize=256)
def no_logprobs(n: int) -> tuple[Float32, Int64]:
    """What a batch gets of which no row asks."""
    return np.zeros((n, 1, 1), np.float32), np.zeros((n, 1, 1), np.int64)

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
    `[n, D + 1, vocab]`, or `[1, S, vocab]` after each token of a scored prompt chunk.
    """
    n, scored, _ = logits.shape
    rules = [decode(each) for each in x.rules.tolist()]
    asked = [each.sampling.logprobs for each in rules]
    most = max((count for count in asked if count is not None), default=None)
    if most is None:
        return no_logprobs(n)
    values = np.zeros((n, scored, 1 + most), np.float32)
    ids = np.zeros((n, scored, 1 + most), np.int64)
    for i, (path, token) in enumerate(kept):
        if asked[i] is None:
            continue
        _, forced, place, _ = x.rows[i].tolist()
        nodes: Sequence[int] = (0, *path)
        tokens = [*(int(x.tokens[i, forced - 1 + node]) for node in path), token]
        if rules[i].score_prompt(place):
            nodes, tokens = range(forced), [*x.tokens[i, 1:].tolist(), token][:forced]
        for j, (node, committed) in enumerate(zip(nodes, tokens, strict=True)):
            line = logits[i, node] - logits[i, node].max()
            line -= np.log(np.exp(line).sum())
            best = np.sort(np.argpartition(-line, max(most - 1, 0))[:most])
            best = best[np.argsort(-line[best], kind="stable")]
            ids[i, j] = [committed, *best.tolist()]
            values[i, j] = line[ids[i, j]]
    return values, ids


@lru_cache(maxsize=256)
def no_logprobs(n: int) -> tuple[Float32, Int64]:
    """What a batch gets of which no row asks."""
    return np.zeros((n, 1, 1), np.float32), np.zeros((n, 1, 1), np.int64)

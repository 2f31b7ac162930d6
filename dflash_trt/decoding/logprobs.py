"""Log-probabilities of committed tokens, for the rows that ask for them."""

from collections.abc import Sequence

import numpy as np

from dflash_trt.decoding.acceptance import Kept
from dflash_trt.decoding.logits_processor import decode
from dflash_trt.decoding.messages import Float32, Int64, VerifyInput


def committed_logprobs(
    x: VerifyInput, kept: Sequence[Kept | None], logits: Float32
) -> tuple[Float32, Int64]:
    """Of the committed tokens and the best ones there, under the target's logits as they are.

    logits `[n, D + 1, vocab]`, or `[1, S, vocab]` after each token of a scored prompt chunk.
    Returns values and ids `[n, D + 1, 1 + K]`, `[n, 1, 1]` if no row asks.
    """
    n, scored, _ = logits.shape
    processors = [decode(each) for each in x.sampling.tolist()]
    counts = [each.sampling.logprobs for each in processors]
    most = max((count for count in counts if count is not None), default=None)
    if most is None:
        return np.zeros((n, 1, 1), np.float32), np.zeros((n, 1, 1), np.int64)
    values = np.zeros((n, scored, 1 + most), np.float32)
    ids = np.zeros((n, scored, 1 + most), np.int64)
    for i, each in enumerate(kept):
        if counts[i] is None:
            continue
        path, token = each or ((), 0)
        _, known, place, _ = x.rows[i].tolist()
        nodes: Sequence[int] = (0, *path)
        tokens = [*(int(x.tokens[i, known - 1 + node]) for node in path), token]
        if processors[i].scores_prompt(place):
            nodes, tokens = range(known), [*x.tokens[i, 1:].tolist(), token][:known]
        for j, (node, committed) in enumerate(zip(nodes, tokens, strict=True)):
            line = logits[i, node] - logits[i, node].max()
            line -= np.log(np.exp(line).sum())
            best = np.sort(np.argpartition(-line, max(most - 1, 0))[:most])
            best = best[np.argsort(-line[best], kind="stable")]
            ids[i, j] = [committed, *best.tolist()]
            values[i, j] = line[ids[i, j]]
    return values, ids

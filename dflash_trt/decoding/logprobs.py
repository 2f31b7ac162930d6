"""Log-probabilities of committed tokens and of drafts, for the rows that ask for them."""

from collections.abc import Sequence

import numpy as np

from dflash_trt.decoding.acceptance import Kept, parents_of
from dflash_trt.decoding.logits_processor import decode
from dflash_trt.decoding.messages import Float32, Int64, VerifyInput


def committed_logprobs(
    x: VerifyInput, kept: Sequence[Kept | None], logits: Float32
) -> tuple[Float32, Int64]:
    """Of the committed tokens and the best ones there, under the target's logits as they are.

    logits `[n, D + 1, vocab]`, or `[1, S, vocab]` after each token of a scored prompt chunk.
    Returns values and ids `[n, D + 1, 1 + K]`, `[n, 1, 1]` if no row asks. Where one asks for its
    drafts the values have a last column of theirs, NaN for those that follow a refused one.
    """
    n, scored, _ = logits.shape
    processors = [decode(each) for each in x.sampling.tolist()]
    counts = [each.sampling.logprobs for each in processors]
    drafts = [each.sampling.include_drafting for each in processors]
    most = max((count for count in counts if count is not None), default=None)
    if most is None and not any(drafts):
        return np.zeros((n, 1, 1), np.float32), np.zeros((n, 1, 1), np.int64)
    most = most or 0
    values = np.zeros((n, scored, 1 + most + any(drafts)), np.float32)
    ids = np.zeros((n, scored, 1 + most), np.int64)
    for i, each in enumerate(kept):
        path, token = each or ((), 0)
        if drafts[i]:
            values[i, :, -1] = np.nan
            _score_drafts(x, i, path, logits[i], values[i, :, -1])
        if counts[i] is None:
            continue
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
            values[i, j, : 1 + most] = line[ids[i, j]]
    return values, ids


def _score_drafts(
    x: VerifyInput, i: int, path: Sequence[int], logits: Float32, scores: Float32
) -> None:
    """Those of row i that follow what was kept, into `scores` `[D + 1]` by their node."""
    length, known, *_ = x.rows[i].tolist()
    after: dict[int, list[int]] = {node: [] for node in (0, *path)}
    for node, parent in enumerate(parents_of(x, i), 1):
        if parent in after:
            after[parent].append(node)
    for parent, nodes in after.items():
        if nodes:
            line = logits[parent]
            most = line.max()
            mass = np.log(np.exp(line - most).sum())
            scores[nodes] = line[x.tokens[i, known:length][np.array(nodes) - 1]] - most - mass

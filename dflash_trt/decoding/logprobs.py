"""Log-probabilities under the target's unprocessed logits."""

import numpy as np

from dflash_trt.decoding.acceptance import Accepted
from dflash_trt.decoding.arrays import Float32, Int64
from dflash_trt.decoding.logits_processor import reached_by
from dflash_trt.decoding.messages import Logprobs, Row


def token_logprobs(row: Row, accepted: Accepted, logits: Float32) -> Logprobs:
    """Return log-probabilities of a row's committed tokens and of the K best in their places.

    logits `[D + 1, vocab]`; of a prompt chunk that `scores_prompt`, of all its tokens: then the
    log-probabilities are those of the token after each.
    """
    tokens = [*row.drafts[: accepted.drafts], accepted.token]
    if row.scores_prompt:
        following = accepted.token if row.next_token is None else row.next_token
        tokens = [*row.tokens[1:], following]
    count = row.processor.sampling.logprobs or 0
    values = np.empty((len(tokens), 1 + count), np.float32)
    ids = np.empty((len(tokens), 1 + count), np.int64)
    for index, token in enumerate(tokens):
        scores = logits[index] - logits[index].max()
        scores -= np.log(np.exp(scores).sum())
        ids[index] = [token, *_likeliest(scores, count).tolist()]
        values[index] = scores[ids[index]]
    return Logprobs(values, ids)


def _likeliest(scores: Float32, count: int) -> Int64:
    """Return the ids of the `count` largest scores, the largest first, of equal ones the lowest."""
    if not count:
        return np.empty(0, np.int64)
    candidates = np.flatnonzero(scores >= reached_by(scores, count))
    order = np.argsort(-scores[candidates], kind="stable")[:count]
    likeliest: Int64 = candidates[order]
    return likeliest


def draft_logprobs(row: Row, accepted: Accepted, logits: Float32) -> list[float]:
    """Return the log-probability of each draft, NaN after the first rejected one.

    logits `[D + 1, vocab]`, of the anchor and each draft.
    """
    values = [float("nan")] * len(row.drafts)
    for index, token in enumerate(row.drafts[: accepted.drafts + 1]):
        highest = logits[index].max()
        values[index] = float(
            logits[index, token] - highest - np.log(np.exp(logits[index] - highest).sum())
        )
    return values

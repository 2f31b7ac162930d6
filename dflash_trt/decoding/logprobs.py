"""Log-probabilities under the target's unprocessed logits."""

import math
from collections.abc import Sequence

import numpy as np

from dflash_trt.decoding.acceptance import Accepted
from dflash_trt.decoding.arrays import Float32
from dflash_trt.decoding.logits_processor import at_least, group_maxima, reached_by
from dflash_trt.decoding.messages import Logprobs, RoundSequence
from dflash_trt.decoding.sampling import TokenValues


def tokens_to_score(sequence: RoundSequence, accepted: Accepted) -> list[int]:
    """Return a sequence's tokens whose log-probabilities are requested, from the first place on.

    These are the committed ones; of a prompt chunk that `scores_prompt` the ones after all of its
    tokens.
    """
    if not sequence.scores_prompt:
        return [*sequence.drafts[: accepted.drafts], accepted.token]
    following = accepted.token if sequence.next_token is None else sequence.next_token
    return [*sequence.tokens[1:], following]


def log_probabilities(logits: Float32, tokens: Sequence[int], count: int) -> Logprobs:
    """Return those of tokens, and of the `count` best in their places.

    logits `[D, vocab]`, of each token's place, and maybe of more.
    """
    values = np.empty((len(tokens), 1 + count), np.float32)
    ids = np.empty((len(tokens), 1 + count), np.int64)
    for place, token in enumerate(tokens):
        of_place = logits[place]
        maxima = group_maxima(of_place)
        highest = maxima.max()
        exponents = of_place - highest
        logarithm = np.log(np.exp(exponents, out=exponents).sum())
        ids[place] = [token, *_likeliest(of_place, maxima, count)]
        values[place] = of_place[ids[place]] - highest - logarithm
    return Logprobs(values, ids)


def _likeliest(logits: Float32, maxima: Float32, count: int) -> list[int]:
    """Return the `count` likeliest tokens, the likeliest first, of equal ones the lowest."""
    if not count:
        return []
    few = at_least(TokenValues(logits), maxima, reached_by(maxima, count))
    order = np.argsort(-few.values, kind="stable")[:count]
    return [few.token(place) for place in order.tolist()]


def draft_logprobs(drafts: Sequence[int], scores: Logprobs) -> list[float]:
    """Return one for each draft, NaN after the first rejected one; scores: of those before."""
    values: list[float] = scores.values[:, 0].tolist()
    return values + [math.nan] * (len(drafts) - len(values))

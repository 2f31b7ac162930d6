"""Seeded Gumbel-max: sampling that depends only on a request's seed and a token's position.

The token at a position maximizes `log(weight) + noise`, with Gumbel noise hashed from seed,
position and token id, so it is distributed by the weights. Proposals use the same noise, so that
they often equal the target's choice (Daliri et al. 2024, arXiv:2408.07978). The text is the same
with any proposals, or none.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dflash_trt.decoding.arrays import Bools, Float32, Float64, Int64, UInt64


@dataclass(frozen=True)
class SamplingParams:
    """One request's sampling parameters; the defaults are plain greedy decoding.

    Semantics are those of vLLM and Triton's TensorRT-LLM clients: penalties change the logits first
    (repetition over prompt and output, the others over the output), then temperature, top_k, top_p
    and min_p, in this order.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None  # alternatives to return for each token; None: no log-probabilities
    seed: int = 0
    prompt_logprobs: bool = False  # with `logprobs`: for prompt tokens too
    logit_bias: tuple[tuple[int, float], ...] = ()  # added to a token's logit before anything else
    include_drafting: bool = False  # return each draft's log-probability


HEAD = np.float32(3e-4)  # tokens of less weight share one noise value
NO_TOKEN = -1
REST = -1  # noise id of the shared tail
INSIDE = -2  # noise id of the choice inside it
_MASK = (1 << 64) - 1
# the constants of splitmix64
STEP_FACTOR = 0x9E3779B97F4A7C15
FIRST_FACTOR = 0xBF58476D1CE4E5B9
SECOND_FACTOR = 0x94D049BB133111EB


@dataclass(slots=True, frozen=True)
class TokenValues:
    """A number for each of some tokens `[k]`, by ascending id; ids None: for all tokens."""

    values: Float32
    ids: Int64 | None = None

    def take(self, places: Int64) -> "TokenValues":
        """Return those at some places, which ascend."""
        ids = places if self.ids is None else self.ids[places]
        return TokenValues(self.values[places], ids)

    def token(self, place: int) -> int:
        return place if self.ids is None else int(self.ids[place])


NO_VALUES = TokenValues(np.empty(0, np.float32), np.empty(0, np.int64))


@dataclass(slots=True, frozen=True)
class Likely:
    """The likeliest tokens of a row `[k]`, by ascending id, with what bounds the others.

    weights: more than HEAD, the largest of the row is 1. sure: which of them the rules surely keep;
    None: all. rest: mass of the other tokens that rules keep, at most. whole: all exact weights.
    """

    ids: Int64
    weights: Float32
    rest: float
    whole: Callable[[], TokenValues]
    sure: Bools | None = None


def likely_of(weights: TokenValues) -> Likely:
    """Return the likeliest by weights that are exact, of which the largest is 1."""
    places = np.flatnonzero(weights.values > HEAD)
    head = weights.values[places]
    ids = places if weights.ids is None else weights.ids[places]
    rest = float(weights.values.sum(dtype=np.float64) - head.sum(dtype=np.float64))
    return Likely(ids, head, rest, lambda: weights)


def sample(rows: Sequence[Likely], seeds: Sequence[int], positions: Sequence[int]) -> list[int]:
    """Sample a token of each of m rows, independent of the other rows.

    Returns NO_TOKEN for a row without tokens.
    """
    m = len(rows)
    bases = hash_bases(seeds, positions)
    lengths = [len(row.ids) for row in rows]
    every, shared = _rows_and_noise_ids(m)
    ids = np.concatenate((*(row.ids for row in rows), shared))
    numbers = np.concatenate((np.repeat(every, lengths), every, every))
    uniforms = _uniforms(ids, bases[numbers])
    logs = np.log(uniforms)
    # with Gumbel noise -log(-log(uniform)), the largest log(weight) + noise has the smallest score
    scores = np.concatenate([row.weights for row in rows]) / logs[: -2 * m]
    rest_logs = logs[-2 * m : -m].tolist()
    tokens: list[int] = []
    end = 0
    for i, row in enumerate(rows):
        start = end
        end += lengths[i]
        if start == end:
            tokens.append(NO_TOKEN)
            continue
        best = int(scores[start:end].argmin())
        # the maximum of many noisy scores is distributed like one noisy score of their total weight
        if row.rest / rest_logs[i] < scores[start + best] or not _is_sure(row, best):
            tokens.append(_sample_whole(row.whole(), bases[i : i + 1], float(uniforms[i - m])))
        else:
            tokens.append(int(row.ids[best]))
    return tokens


def _is_sure(row: Likely, place: int) -> bool:
    return row.sure is None or bool(row.sure[place])


def _sample_whole(weights: TokenValues, base: UInt64, inside: float) -> int:
    """Sample a token by exact weights; inside: the uniform of a choice within the rest."""
    row = likely_of(weights)
    logs = np.log(_uniforms(np.append(row.ids, REST), base))
    scores = row.weights / logs[:-1]
    best = int(scores.argmin())
    if row.rest / float(logs[-1]) < scores[best]:
        others = np.where(weights.values > HEAD, np.float32(0), weights.values)
        place = _draw(others, inside)
        if place is not None:
            return weights.token(place)
    return int(row.ids[best])


def _draw(weights: Float32, uniform: float) -> int | None:
    """Return an index drawn by weights `[k]` and a uniform in [0, 1); None if all are 0."""
    cumulative = weights.cumsum(dtype=np.float64)
    total = float(cumulative[-1])
    if not total:
        return None
    # side="right" skips weights of 0
    index = int(cumulative.searchsorted(uniform * total, side="right"))
    if index == len(weights):
        return int(weights.argmax())
    return index


def noise(seed: int, positions: Sequence[int], ids: Int64) -> Float64:
    """Return standard Gumbel noise of token `ids` `[p, k]` at p positions."""
    uniforms = _uniforms(ids, hash_bases([seed] * len(positions), positions)[:, None])
    gumbel: Float64 = -np.log(-np.log(uniforms))
    return gumbel


def hash_bases(seeds: Sequence[int], positions: Sequence[int]) -> UInt64:
    pairs = zip(seeds, positions, strict=True)
    bases = [_splitmix64(_splitmix64(seed) + position) for seed, position in pairs]
    return np.array(bases, np.uint64)


def _uniforms(ids: Int64, bases: UInt64) -> Float64:
    """Hash ids with their bases to uniforms: the upper half of splitmix64's output."""
    bits = ids.astype(np.uint64)
    bits *= np.uint64(STEP_FACTOR)
    bits += bases
    bits ^= bits >> np.uint64(30)
    bits *= np.uint64(FIRST_FACTOR)
    bits ^= bits >> np.uint64(27)
    bits *= np.uint64(SECOND_FACTOR)
    bits >>= np.uint64(32)
    uniforms: Float64 = bits.astype(np.float64)
    uniforms += 0.5
    uniforms *= 2.0**-32
    return uniforms


@lru_cache(maxsize=64)
def _rows_and_noise_ids(m: int) -> tuple[Int64, Int64]:
    """Return row numbers `[m]`, and the noise ids `[2 * m]` that every row has."""
    return np.arange(m), np.repeat((REST, INSIDE), m)


@lru_cache(maxsize=4096)
def _splitmix64(number: int) -> int:
    bits = (number + STEP_FACTOR) & _MASK
    bits = ((bits ^ (bits >> 30)) * FIRST_FACTOR) & _MASK
    bits = ((bits ^ (bits >> 27)) * SECOND_FACTOR) & _MASK
    return bits ^ (bits >> 31)

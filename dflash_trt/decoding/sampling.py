"""Seeded Gumbel-max: sampling that depends only on a request's seed and a token's position.

The token at a position maximizes `log(weight) + noise`, with Gumbel noise hashed from seed,
position and token id, so it is distributed by the weights. Proposals use the same noise, so that
they often equal the target's choice (Daliri et al. 2024, arXiv:2408.07978). The text is the same
with any proposals, or none.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dflash_trt.decoding.arrays import Float32, Float64, Int64, UInt64


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
_STEP = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def sample(weights: Float32, seeds: Sequence[int], positions: Sequence[int]) -> list[int]:
    """Sample a token for each row of `weights` `[m, vocab]`, independent of the other rows.

    A row's largest weight is 1. Returns NO_TOKEN for a row of NaN.
    """
    m, vocab = weights.shape
    in_head = weights > HEAD
    flat = np.flatnonzero(in_head)  # nonzero of a matrix takes eight times as long
    rows = flat // vocab
    head = flat - rows * vocab
    head_weights = weights.ravel()[flat]
    rest = weights.sum(1, dtype=np.float64) - np.bincount(rows, head_weights, m)
    every, shared = _rows_and_noise_ids(m)
    bases = _hash_bases(seeds, positions)[np.concatenate((rows, every, every))]
    uniforms = _uniforms(np.concatenate((head, shared)), bases)
    logs = np.log(uniforms)
    # with Gumbel noise -log(-log(uniform)), the largest log(weight) + noise has the smallest score
    scores = head_weights / logs[: len(head)]
    rest_scores = (rest / logs[-2 * m : -m]).tolist()
    ends = rows.searchsorted(every, "right").tolist()
    tokens: list[int] = []
    for i, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if start == end or math.isnan(rest_scores[i]):
            tokens.append(NO_TOKEN)
            continue
        best = start + int(scores[start:end].argmin())
        # the maximum of many noisy scores is distributed like one noisy score of their total weight
        token = None
        if rest_scores[i] < scores[best]:
            others = np.where(in_head[i], np.float32(0), weights[i])
            token = _draw(others, float(uniforms[i - m]))
        tokens.append(int(head[best]) if token is None else token)
    return tokens


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
    uniforms = _uniforms(ids, _hash_bases([seed] * len(positions), positions)[:, None])
    gumbel: Float64 = -np.log(-np.log(uniforms))
    return gumbel


def _hash_bases(seeds: Sequence[int], positions: Sequence[int]) -> UInt64:
    pairs = zip(seeds, positions, strict=True)
    bases = [_splitmix64(_splitmix64(seed) + position) for seed, position in pairs]
    return np.array(bases, np.uint64)


def _uniforms(ids: Int64, bases: UInt64) -> Float64:
    """Hash ids with their bases to uniforms: the upper half of splitmix64's output."""
    bits = ids.astype(np.uint64)
    bits *= np.uint64(_STEP)
    bits += bases
    bits ^= bits >> np.uint64(30)
    bits *= np.uint64(_FIRST)
    bits ^= bits >> np.uint64(27)
    bits *= np.uint64(_SECOND)
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
    bits = (number + _STEP) & _MASK
    bits = ((bits ^ (bits >> 30)) * _FIRST) & _MASK
    bits = ((bits ^ (bits >> 27)) * _SECOND) & _MASK
    return bits ^ (bits >> 31)

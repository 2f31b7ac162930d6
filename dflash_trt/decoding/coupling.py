"""Draws that depend on a request's seed and a token's position alone, whatever was proposed.

The token at a position is the one with the best `log(weight) + noise`, with Gumbel noise hashed
from seed, position and token id: a draw in proportion to the weights (Gumbel-max). Who proposes
adds the same noise, so that proposals and the target's choice are often alike (Daliri et al. 2024,
arXiv:2408.07978), and the text is the same with any proposals, or none.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from dflash_trt.decoding.messages import Float32, Float64, Int64
from dflash_trt.decoding.sampling import draw

HEAD = 3e-4  # tokens of less weight, of the best one's, share one noise
REST, INSIDE = -1, -2  # ids of the noises of all these together, and of which one of them it is
_MASK = (1 << 64) - 1
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def choose(weights: Float32, seed: int, position: int) -> int:
    """The token drawn by non-negative `weights` `[vocab]`, those of `sampling.weights`.

    FloatingPointError when they are no numbers.
    """
    most = float(weights.max())
    if not 0 < most < math.inf:
        raise FloatingPointError
    head = (weights > most * HEAD).nonzero()[0]
    of_head = weights[head]
    rest = max(float(weights.sum(dtype=np.float64) - of_head.sum(dtype=np.float64)), 0.0)
    if len(head) == 1 and not rest:
        return int(head[0])
    ids = np.append(head, (REST, INSIDE))
    noises = noise(seed, [position], ids[None])[0]
    scores = np.log(of_head) + noises[:-2]
    best = int(scores.argmax())
    # the best of many noisy scores is distributed like one noisy score of all their weight
    if not rest or math.log(rest) + noises[-2] < scores[best]:
        return int(head[best])
    weights = weights.copy()
    weights[head] = 0
    return draw(weights, math.exp(-math.exp(-noises[-1]))) or 0


def noise(seed: int, positions: Sequence[int], ids: Int64) -> Float64:
    """Standard Gumbel noise of the token `ids` `[p, k]` at p positions."""
    bases = np.array([_mixed(_mixed(seed) + position) for position in positions], np.uint64)
    x = ids.astype(np.uint64) * np.uint64(_STEP) + bases[:, None]
    x ^= x >> np.uint64(30)
    x *= np.uint64(_FIRST)
    x ^= x >> np.uint64(27)
    x *= np.uint64(_SECOND)
    x ^= x >> np.uint64(31)
    uniforms = ((x >> np.uint64(32)).astype(np.float64) + 0.5) * 2.0**-32
    found: Float64 = -np.log(-np.log(uniforms))
    return found


@lru_cache(maxsize=4096)
def _mixed(number: int) -> int:
    """splitmix64's output for a state."""
    x = (number + _STEP) & _MASK
    x = ((x ^ (x >> 30)) * _FIRST) & _MASK
    x = ((x ^ (x >> 27)) * _SECOND) & _MASK
    return x ^ (x >> 31)

"""Distributions that tokens are drawn from, and the random numbers that draw them."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dflash_trt.errors import RequestError

CANDIDATES = 16  # a drafter's distribution is carried as its best 16 tokens; exact, see `propose`

Floats = npt.NDArray[np.float32] | npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32] | npt.NDArray[np.int64]


@dataclass(frozen=True)
class Sampling:
    """How one request draws tokens; temperature 0 is greedy, top_k 0 and top_p 1 are off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        """RequestError for a value that no distribution can be made from."""
        if not 0 <= self.temperature < math.inf:
            raise RequestError(f"temperature is {self.temperature}", "Give 0 (greedy) or more.")
        if self.top_k < 0:
            raise RequestError(f"top_k is {self.top_k}", "Give 0 (off) or more.")
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p is {self.top_p}", "Give more than 0, at most 1 (off).")
        if not 0 <= self.seed < 2**63:
            raise RequestError(f"seed is {self.seed}", "Give an integer from 0 to 2^63 - 1.")


def distribution(logits: Floats, sampling: Sampling) -> npt.NDArray[np.float64]:
    """Probabilities `[..., vocab]` under temperature, then top-k, then top-p (as z-lab samples).

    top-p keeps the smallest set of most likely tokens whose mass reaches it, at least one.
    """
    scores = logits.astype(np.float64) / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        dropped = np.argpartition(-scores, sampling.top_k - 1, axis=-1)[..., sampling.top_k :]
        np.put_along_axis(scores, dropped, -np.inf, axis=-1)
    probs: npt.NDArray[np.float64] = np.exp(scores - scores.max(axis=-1, keepdims=True))
    probs /= probs.sum(axis=-1, keepdims=True)
    if sampling.top_p < 1.0:
        order = np.argsort(-probs, axis=-1, kind="stable")
        ranked = np.take_along_axis(probs, order, axis=-1)
        mass_before = np.cumsum(ranked, axis=-1) - ranked
        ranked[mass_before >= sampling.top_p] = 0.0
        np.put_along_axis(probs, order, ranked, axis=-1)
        probs /= probs.sum(axis=-1, keepdims=True)
    return probs


def generator(seed: int, position: int, stage: int) -> np.random.Generator:
    """Random numbers that depend on the request's seed and the token position alone.

    `stage` keeps drafting (0) and acceptance (1) at one position independent.
    """
    return np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, stage, position]))


def draw(weights: Floats, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Indices `[...]`, each drawn in proportion to non-negative `weights` `[..., k]`."""
    cumulative = np.cumsum(weights, axis=-1, dtype=np.float64)
    points = rng.random(weights.shape[:-1]) * cumulative[..., -1]
    below = (cumulative <= points[..., None]).sum(axis=-1, dtype=np.int64)
    drawn: npt.NDArray[np.int64] = np.minimum(below, weights.shape[-1] - 1)
    return drawn


def propose(
    logits: Floats, sampling: Sampling, rng: np.random.Generator
) -> tuple[Ints, Ints, npt.NDArray[np.float32]]:
    """Draw drafts `[D]` from the drafter's logits `[D, vocab]`.

    Also returns what they were drawn from: candidates int32 `[D, 16]` and their probabilities
    `[D, 16]`. The drafter's distribution is cut to its 16 best tokens. Rejection sampling is exact
    for whatever distribution a draft was drawn from: the cut costs acceptance, never exactness.
    """
    rows, count = np.arange(len(logits)), min(CANDIDATES, logits.shape[-1])
    ids = np.zeros((len(rows), CANDIDATES), np.int32)  # a tiny vocabulary leaves some unused
    probs = np.zeros(ids.shape, np.float32)
    best = np.argpartition(logits, -count, axis=-1)[:, -count:]
    ids[:, :count] = best
    probs[:, :count] = distribution(logits[rows[:, None], best], sampling)
    return ids[rows, draw(probs, rng)], ids, probs

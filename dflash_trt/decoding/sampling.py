"""The distributions that tokens are drawn from, and the draws."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dflash_trt.errors import RequestError

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Sampling:
    """How one request draws tokens; the defaults are greedy decoding with every rule off.

    As vLLM and Triton's TensorRT-LLM clients mean them: penalties change the logits first
    (repetition looks at prompt and output, the other two at the output), then temperature,
    top_k, top_p and min_p cut the distribution, in this order.
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
    logprobs: int | None = None  # alternatives to report for each token; None: no logprobs
    seed: int = 0
    prompt_logprobs: bool = False  # with `logprobs`: of the prompt's tokens too

    def __post_init__(self) -> None:
        """RequestError for a value that no distribution can be made from."""
        _require(0 <= self.temperature < math.inf, "temperature", self, "0 (greedy) or more")
        _require(self.top_k >= 0, "top_k", self, "0 (off) or more")
        _require(0 < self.top_p <= 1, "top_p", self, "more than 0, at most 1 (off)")
        _require(0 <= self.min_p <= 1, "min_p", self, "0 (off) to 1")
        _require(0 < self.repetition_penalty < math.inf, "repetition_penalty", self, "above 0")
        _require(abs(self.presence_penalty) < math.inf, "presence_penalty", self, "a number")
        _require(abs(self.frequency_penalty) < math.inf, "frequency_penalty", self, "a number")
        _require(self.min_tokens >= 0, "min_tokens", self, "0 or more")
        _require(0 <= (self.logprobs or 0) <= MOST_LOGPROBS, "logprobs", self, "0 to 20")
        _require(0 <= self.seed < 2**63, "seed", self, "an integer from 0 to 2^63 - 1")


MOST_LOGPROBS = 20


def _require(holds: bool, name: str, sampling: Sampling, fix: str) -> None:
    if not holds:
        raise RequestError(f"{name} is {getattr(sampling, name)}", f"Give {fix}.")


def weights(logits: Float32, sampling: Sampling) -> Float32:
    """Probabilities `[vocab]` times a positive factor, from logits `[vocab]`.

    At temperature 0 only the best token has weight. top-p keeps the smallest set of most likely
    tokens whose mass reaches it, at least one (as z-lab samples); min-p keeps those with at least
    that share of the most likely one's mass.
    """
    if sampling.temperature == 0:
        kept = np.zeros_like(logits)
        kept[logits.argmax()] = 1.0
        return kept
    return cut(tempered(logits[None], [sampling.temperature])[0], sampling)


def tempered(logits: Float32, temperatures: Sequence[float]) -> Float32:
    """`weights` of rows `[m, .., vocab]` that have a temperature and no cut: the best one has 1."""
    kept: Float32 = logits - np.maximum.reduce(logits, -1, keepdims=True)
    kept /= np.array(temperatures, np.float32).reshape(-1, *[1] * (logits.ndim - 1))
    np.exp(kept, out=kept)
    return kept


def cut(kept: Float32, sampling: Sampling) -> Float32:
    """The same `[vocab]` after top-k, top-p and min-p: those that are cut have 0 now."""
    if 0 < sampling.top_k < len(kept):
        kept[kept < np.partition(kept, -sampling.top_k)[-sampling.top_k]] = 0.0
    if sampling.top_p < 1.0:
        order = np.argsort(-kept, kind="stable")
        ranked = kept[order]
        mass_before = np.cumsum(ranked) - ranked
        kept[order[mass_before >= sampling.top_p * ranked.sum()]] = 0.0
    if sampling.min_p > 0.0:
        kept[kept < sampling.min_p] = 0.0
    return kept


def draw(weights: Float32, uniform: float) -> int | None:
    """An index, drawn in proportion to non-negative `weights` `[k]` by a uniform of [0, 1).

    None when all weights are 0; FloatingPointError when they are no numbers.
    """
    cumulative = weights.cumsum(dtype=np.float64)
    total = float(cumulative[-1])
    if not math.isfinite(total):
        raise FloatingPointError
    if not total:
        return None
    # side="right" passes over weights of 0
    index = int(cumulative.searchsorted(uniform * total, side="right"))
    return index if index < len(weights) else int(weights.argmax())


def propose(
    logits: Float32, samplings: Sequence[Sampling], uniforms: Float64
) -> tuple[Int64, Float32]:
    """Draw drafts from the drafter's k best tokens, by their logits `[n, .., k]`, best first.

    uniforms of [0, 1) `[n, ..]`, one for each draw. Returns which of the k were drawn `[n, ..]`,
    and the probabilities `[n, .., k]` that they were drawn with. Rejection sampling is exact for
    whatever distribution a draft was drawn from: the cut costs acceptance, never exactness.
    """
    kept = tempered(logits, [sampling.temperature or 1.0 for sampling in samplings])
    for line, sampling in zip(kept, samplings, strict=True):
        _cut_ranked(line, sampling)
    cumulative = np.add.accumulate(kept, -1)
    total = cumulative[..., -1:]
    kept /= total
    drawn: Int64 = np.add.reduce(cumulative <= uniforms[..., None] * total, -1)
    return drawn, kept


def _cut_ranked(kept: Float32, sampling: Sampling) -> None:
    """`cut` of weights `[.., k]`, best first; without a temperature only the best one is left."""
    top_k = sampling.top_k if sampling.temperature else 1
    if top_k:
        kept[..., top_k:] = 0.0
    if sampling.top_p < 1.0:
        cumulative = kept.cumsum(-1)
        kept[cumulative - kept >= sampling.top_p * cumulative[..., -1:]] = 0.0
    if sampling.min_p > 0.0:
        kept[kept < sampling.min_p] = 0.0

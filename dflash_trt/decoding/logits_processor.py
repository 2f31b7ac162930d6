"""Logits processing: from the target's logits to sampling weights, by a request's parameters."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache

import numpy as np
from pydantic import TypeAdapter

from dflash_trt.decoding.arrays import Float32, Int64
from dflash_trt.decoding.sampling import SamplingParams


@dataclass(frozen=True)
class LogitsProcessor:
    sampling: SamplingParams
    prompt_tokens: int
    stop_ids: tuple[int, ...]  # not sampled before min_tokens

    @cached_property
    def needs_history(self) -> bool:
        """Whether sampling depends on which tokens came before, not only on their number."""
        sampling = self.sampling
        if sampling.bad_words or sampling.repetition_penalty != 1:
            return True
        return bool(sampling.presence_penalty or sampling.frequency_penalty)

    @cached_property
    def greedy(self) -> bool:
        """Whether the token is always the argmax of the unchanged logits."""
        sampling = self.sampling
        if sampling.temperature or sampling.min_tokens or sampling.logit_bias:
            return False
        return not self.needs_history

    @cached_property
    def only_temperature(self) -> bool:
        """Whether nothing but a temperature changes the logits."""
        sampling = self.sampling
        if not sampling.temperature or sampling.logit_bias or self.needs_history:
            return False
        return not (sampling.top_k or sampling.top_p < 1 or sampling.min_p or sampling.min_tokens)

    def scores_prompt(self, position: int) -> bool:
        """Return whether a prompt chunk with log-probabilities for all tokens starts here."""
        return self.sampling.prompt_logprobs and position < self.prompt_tokens

    def weights(self, logits: Float32, position: int, history: Sequence[int]) -> Float32:
        """Return sampling weights `[vocab]` of the token at `position`, not normalized.

        history: all tokens before it; may be empty unless `needs_history`.
        """
        sampling = self.sampling
        if sampling.logit_bias:
            logits = logits.copy()
            for token, bias in sampling.logit_bias:
                logits[token] += np.float32(bias)
        if self.needs_history:
            logits = self._with_penalties(logits, np.array(history, np.int64))
        return weights(_mask_banned(logits, self._banned(position, history)), sampling)

    def _banned(self, position: int, history: Sequence[int]) -> list[int]:
        """Return the tokens that may not come next: early stop tokens, and ends of bad words."""
        banned = list[int]()
        if position - self.prompt_tokens < self.sampling.min_tokens:
            banned += self.stop_ids
        for *before, last in self.sampling.bad_words:
            if list(history[len(history) - len(before) :]) == before:
                banned.append(last)
        return banned

    def _with_penalties(self, logits: Float32, history: Int64) -> Float32:
        sampling = self.sampling
        penalty = np.float32(sampling.repetition_penalty)
        logits = logits.copy()
        seen = np.unique(history)
        values = logits[seen]
        logits[seen] = np.where(values > 0, values / penalty, values * penalty)
        output, counts = np.unique(history[self.prompt_tokens :], return_counts=True)
        logits[output] -= np.float32(sampling.presence_penalty)
        logits[output] -= np.float32(sampling.frequency_penalty) * counts.astype(np.float32)
        return logits

    @cached_property
    def encoded(self) -> bytes:
        """JSON for the ensemble's tensor; empty for plain greedy decoding."""
        plain = self.greedy and self.sampling.logprobs is None
        if plain and not self.sampling.include_drafting:
            return b""
        return json.dumps(asdict(self)).encode()


PLAIN_GREEDY = LogitsProcessor(SamplingParams(), prompt_tokens=0, stop_ids=())
_ADAPTER = TypeAdapter(LogitsProcessor)


@lru_cache(maxsize=128)  # the same every round; 1 MB for the largest bad_words
def decode_processor(encoded: bytes) -> LogitsProcessor:
    """Decode what `encoded` has; ValueError or RequestError for anything else."""
    if not encoded:
        return PLAIN_GREEDY
    return _ADAPTER.validate_json(encoded, strict=True)


def _mask_banned(logits: Float32, banned: Sequence[int]) -> Float32:
    """Mask the banned tokens, unless the grammar allows no others."""
    if not banned:
        return logits
    remaining = logits.copy()
    remaining[banned] = -np.inf
    if not np.isfinite(remaining).any():
        return logits
    return remaining


def weights(logits: Float32, sampling: SamplingParams) -> Float32:
    """Return weights `[vocab]`, probabilities up to a factor, from logits `[vocab]`."""
    if sampling.temperature == 0:
        only_best = np.zeros_like(logits)
        only_best[logits.argmax()] = 1.0
        return only_best
    return truncate(tempered(logits[None], [sampling.temperature])[0], sampling)


def tempered(logits: Float32, temperatures: Sequence[float]) -> Float32:
    """Apply temperatures to rows `[m, vocab]`; return weights whose maximum is 1."""
    weights: Float32 = logits - np.maximum.reduce(logits, -1, keepdims=True)
    weights /= np.array(temperatures, np.float32)[:, None]
    np.exp(weights, out=weights)
    return weights


def truncate(weights: Float32, sampling: SamplingParams) -> Float32:
    """Apply top-k, top-p and min-p to `weights` `[.., k]` in place: removed tokens get 0.

    top-p keeps the smallest set of most likely tokens whose mass reaches it, at least one (as z-lab
    samples); min-p keeps tokens with at least that fraction of the highest weight.
    """
    if 0 < sampling.top_k < weights.shape[-1]:
        last = np.partition(weights, -sampling.top_k, -1)[..., -sampling.top_k, None]
        weights[weights < last] = 0.0
    if sampling.top_p < 1.0:
        order = np.argsort(-weights, -1, kind="stable")
        ranked = np.take_along_axis(weights, order, -1)
        mass_before = ranked.cumsum(-1) - ranked
        ranked[mass_before >= sampling.top_p * ranked.sum(-1, keepdims=True)] = 0.0
        np.put_along_axis(weights, order, ranked, -1)
    if sampling.min_p > 0.0:
        weights[weights < sampling.min_p * weights.max(-1, keepdims=True)] = 0.0
    return weights

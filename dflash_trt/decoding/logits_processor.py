"""Logits processing: from the target's logits to sampling weights, by a request's parameters."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from dflash_trt.decoding.arrays import Bools, Float32, Int32, Int64
from dflash_trt.decoding.sampling import NO_VALUES, SamplingParams, TokenValues

FEW = 8  # a grammar allows few tokens, if fewer than this part of the vocabulary
PER_MAXIMUM = 64  # tokens of which one maximum is taken
ROUNDING = 1e-6  # relative, of a logit's rounding on its way to a weight
ONE = np.int32(0x3F800000)  # the bits of 1.0
BIN_SHIFT = 17  # 64 bins for each factor of 2
SORTED = 2048  # so many tokens are sorted at most, beside those of a bin


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

    def scores_prompt(self, position: int) -> bool:
        """Return whether a prompt chunk with log-probabilities for all tokens starts here."""
        return self.sampling.prompt_logprobs and position < self.prompt_tokens

    def weights(
        self,
        logits: Float32,
        position: int,
        history: Sequence[int],
        mask: Int32 | None = None,
    ) -> TokenValues:
        """Return sampling weights of the token at `position`, probabilities up to a factor.

        logits `[vocab]`; history: all tokens before it, may be empty unless `needs_history`; mask:
        a grammar's bits `[vocab / 32]`. There are no values if no token is allowed.
        """
        tokens = _allowed(logits, mask)
        banned = self._banned(position, history)
        if banned or self.needs_history or self.sampling.logit_bias:
            tokens = TokenValues(tokens.values.copy(), tokens.ids)
            self._add_bias(tokens)
            self._add_penalties(tokens, history)
            _ban(tokens, banned)
        return weights(tokens, self.sampling)

    def _banned(self, position: int, history: Sequence[int]) -> list[int]:
        """Return the tokens that may not come next: early stop tokens, and ends of bad words."""
        banned = list[int]()
        if position - self.prompt_tokens < self.sampling.min_tokens:
            banned += self.stop_ids
        for *before, last in self.sampling.bad_words:
            if list(history[len(history) - len(before) :]) == before:
                banned.append(last)
        return banned

    def _add_bias(self, logits: TokenValues) -> None:
        if not self.sampling.logit_bias:
            return
        tokens, biases = zip(*self.sampling.logit_bias, strict=True)
        places, known = _places(logits, np.array(tokens))
        np.add.at(logits.values, places, np.array(biases, np.float32)[known])

    def _add_penalties(self, logits: TokenValues, history: Sequence[int]) -> None:
        sampling = self.sampling
        values = logits.values
        if sampling.repetition_penalty != 1:
            penalty = np.float32(sampling.repetition_penalty)
            places, _ = _places(logits, np.unique(np.array(history, np.int64)))
            before = values[places]
            values[places] = np.where(before > 0, before / penalty, before * penalty)
        if sampling.presence_penalty or sampling.frequency_penalty:
            output = np.array(history[self.prompt_tokens :], np.int64)
            tokens, counts = np.unique(output, return_counts=True)
            places, known = _places(logits, tokens)
            values[places] -= np.float32(sampling.presence_penalty)
            times = counts[known].astype(np.float32)
            values[places] -= np.float32(sampling.frequency_penalty) * times

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


def _allowed(logits: Float32, mask: Int32 | None) -> TokenValues:
    """Return the logits of the tokens that a grammar allows."""
    if mask is None:
        return TokenValues(logits)
    allowed = unpack(mask, len(logits))
    if np.count_nonzero(allowed) > len(logits) // FEW:
        return TokenValues(np.where(allowed, logits, np.float32(-np.inf)))
    return TokenValues(logits).take(np.flatnonzero(allowed))


def unpack(mask: Int32, vocab: int) -> Bools:
    """Unpack a grammar's bit mask into booleans `[vocab]`."""
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little", count=vocab)
    return bits.view(np.bool_)


def _places(tokens: TokenValues, ids: Int64) -> tuple[Int64, Bools]:
    """Return the places of those ids that have a value, and which of the ids these are."""
    if tokens.ids is None:
        return ids, np.ones(len(ids), bool)
    places = tokens.ids.searchsorted(ids)
    places[places == len(tokens.ids)] = 0
    known: Bools = tokens.ids[places] == ids if len(tokens.ids) else np.zeros(len(ids), bool)
    return places[known], known


def _ban(logits: TokenValues, banned: Sequence[int]) -> None:
    """Ban tokens, unless the grammar allows no others."""
    if not banned:
        return
    places, _ = _places(logits, np.array(banned))
    before = logits.values[places]
    logits.values[places] = -np.inf
    if not np.isfinite(logits.values).any():
        logits.values[places] = before


def weights(logits: TokenValues, sampling: SamplingParams) -> TokenValues:
    """Return weights, whose largest is 1, of the tokens that temperature and truncation leave."""
    values = logits.values
    highest = values.max(initial=-np.inf)
    if not np.isfinite(highest):
        return NO_VALUES
    if sampling.temperature == 0:
        best = logits.take(values.argmax(keepdims=True))
        return TokenValues(np.ones(1, np.float32), best.ids)
    least = _least_logit(values, highest, sampling)
    if least > -np.inf:
        logits = logits.take(np.flatnonzero(values >= least))
    exponents = logits.values - highest
    if sampling.temperature != 1:
        exponents /= np.float32(sampling.temperature)
    return _truncated(TokenValues(np.exp(exponents, out=exponents), logits.ids), sampling)


def _least_logit(values: Float32, highest: np.float32, sampling: SamplingParams) -> float:
    """Return a logit that no token is below that top-k or min-p leave; -inf: any may be left.

    It is a little low, as logits that differ in their last bits may have equal weights.
    """
    least = -np.inf
    if sampling.top_k:
        least = reached_by(values, sampling.top_k)
    elif sampling.min_p and sampling.top_p == 1 and not sampling.top_k:
        least = float(highest) + sampling.temperature * math.log(sampling.min_p)
    size = abs(float(highest)) + abs(least) + sampling.temperature
    return least - ROUNDING * size if least > -np.inf else least


def reached_by(values: Float32, count: int) -> float:
    """Return a bound that at least `count` values reach, and few more; -inf if that is not easy."""
    groups = len(values) // PER_MAXIMUM
    if count >= groups:
        return -np.inf
    # so many groups have a value as large as the last of these maxima
    maxima = values[: groups * PER_MAXIMUM].reshape(PER_MAXIMUM, groups).max(0)
    return float(np.partition(maxima, -count)[-count])


def _truncated(weights: TokenValues, sampling: SamplingParams) -> TokenValues:
    """Leave what top-k, top-p and min-p keep, in this order; see `truncate`."""
    values = weights.values
    if 0 < sampling.top_k < len(values):
        last = np.partition(values, -sampling.top_k)[-sampling.top_k]
        weights = weights.take(np.flatnonzero(values >= last))
    if sampling.top_p < 1.0:
        weights = weights.take(_nucleus(weights.values, sampling.top_p))
    if sampling.min_p > 0.0:
        values = weights.values
        weights = weights.take(np.flatnonzero(values >= sampling.min_p * values.max()))
    return weights


def _nucleus(values: Float32, top_p: float) -> Int64:
    """Return the places of the likeliest tokens whose mass reaches top_p of all, ascending.

    values `[k]`, at most 1. Bins by the leading bits of a weight are in the order of weights: where
    many tokens are surely inside, only those of the bin in which the mass is reached are sorted.
    """
    total = float(values.sum(dtype=np.float64))
    # all tokens below this have less than the mass that is left out
    floor = np.float32((1 - top_p) * total / len(values) * (1 - 1e-6))
    places = np.flatnonzero(values >= floor)
    weights = values[places]
    bins = (ONE - weights.view(np.int32)) >> BIN_SHIFT
    mass_of_bins = np.bincount(bins, weights)
    reached = np.cumsum(mass_of_bins)
    last = min(int(reached.searchsorted(top_p * total)), len(reached) - 1)
    inside = bins < last
    before: np.floating[Any]
    border: np.floating[Any]
    if np.count_nonzero(inside) <= SORTED:
        # one bin more, as rounding may move the border
        sorted_ones = np.flatnonzero(bins <= last + 1)
        inside[:] = False
        before = np.float32(0)
        border = np.float32(top_p) * np.float32(total)
    else:
        sorted_ones = np.flatnonzero(bins == last)
        before = reached[last] - mass_of_bins[last]
        border = np.float64(top_p * total)
    sorted_ones = sorted_ones[np.argsort(-weights[sorted_ones], kind="stable")]
    ranked = weights[sorted_ones].astype(border.dtype)
    inside[sorted_ones[before + ranked.cumsum() - ranked < border]] = True
    kept: Int64 = places[inside]
    return kept


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

"""Logits processing: from the target's logits to sampling weights, by a request's parameters."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache, partial

import numpy as np
from pydantic import TypeAdapter

from dflash_trt.decoding.arrays import Bools, Float32, Int32, Int64
from dflash_trt.decoding.sampling import (
    HEAD,
    NO_VALUES,
    Likely,
    SamplingParams,
    TokenValues,
    likely_of,
)

FEW = 8  # a grammar allows few tokens, if fewer than this part of the vocabulary
PER_MAXIMUM = 64  # tokens of which one maximum is taken
ROUNDING = 1e-6  # relative, of a logit's rounding on its way to a weight
BORDER = 1e-3  # relative, of the rounding of a float32 sum
SUM = np.float32  # texts depend on it where many tokens have equal weights
LITTLE = 0.1  # a rest of so much is seldom sampled
ONE = np.int32(0x3F800000)  # the bits of 1.0
BIN_SHIFT = 17  # 64 bins for each factor of 2

History = Sequence[int] | Int64


@dataclass(frozen=True)
class LogitsProcessor:
    sampling: SamplingParams
    prompt_tokens: int
    stop_ids: tuple[int, ...]  # not sampled before min_tokens

    @cached_property
    def penalizes(self) -> bool:
        """Whether logits depend on which tokens came before."""
        sampling = self.sampling
        if sampling.repetition_penalty != 1:
            return True
        return bool(sampling.presence_penalty or sampling.frequency_penalty)

    @cached_property
    def needs_history(self) -> bool:
        """Whether sampling depends on which tokens came before, not only on their number."""
        return self.penalizes or bool(self.sampling.bad_words)

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
        history: History,
        mask: Int32 | None = None,
    ) -> TokenValues:
        """Return sampling weights of the token at `position`, probabilities up to a factor.

        logits `[vocab]`; history: all tokens before it, may be empty unless `needs_history`; mask:
        a grammar's bits `[vocab / 32]`. There are no values if no token is allowed.
        """
        return weights(self._processed(logits, position, history, mask), self.sampling)

    def likely(
        self,
        logits: Float32,
        position: int,
        history: History,
        mask: Int32 | None = None,
    ) -> Likely:
        """Return the likeliest tokens at `position`; see `weights`, of which few are computed."""
        tokens = self._processed(logits, position, history, mask)
        if not self.sampling.temperature or self.sampling.top_k:
            return likely_of(weights(tokens, self.sampling))
        whole = partial(self.weights, logits, position, history, mask)
        return _likely(tokens, self.sampling, whole)

    def _processed(
        self, logits: Float32, position: int, history: History, mask: Int32 | None
    ) -> TokenValues:
        """Return the logits of allowed tokens, after bias, penalties and bans."""
        tokens = _allowed(logits, mask)
        banned = self.banned(position, history)
        if not (banned or self.penalizes or self.sampling.logit_bias):
            return tokens
        tokens = TokenValues(tokens.values.copy(), tokens.ids)
        self._add_bias(tokens)
        self._add_penalties(tokens, history)
        _ban(tokens, banned)
        return tokens

    def banned(self, position: int, history: History) -> list[int]:
        """Return the tokens that may not come next: early stop tokens, and ends of bad words."""
        banned = list[int]()
        if position - self.prompt_tokens < self.sampling.min_tokens:
            banned += self.stop_ids
        for *before, last in self.sampling.bad_words:
            if [*history[len(history) - len(before) :]] == before:
                banned.append(last)
        return banned

    def _add_bias(self, logits: TokenValues) -> None:
        if not self.sampling.logit_bias:
            return
        tokens, biases = zip(*self.sampling.logit_bias, strict=True)
        places, known = _places(logits, np.array(tokens))
        np.add.at(logits.values, places, np.array(biases, np.float32)[known])

    def _add_penalties(self, logits: TokenValues, history: History) -> None:
        sampling = self.sampling
        values = logits.values
        if sampling.repetition_penalty != 1:
            penalty = np.float32(sampling.repetition_penalty)
            places, _ = _places(logits, np.asarray(history, np.int64))
            before = values[places]
            values[places] = np.where(before > 0, before / penalty, before * penalty)
        if sampling.presence_penalty or sampling.frequency_penalty:
            output = np.asarray(history[self.prompt_tokens :], np.int64)
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
    maxima = group_maxima(values)
    highest = maxima.max(initial=-np.inf)
    if not np.isfinite(highest):
        return NO_VALUES
    if sampling.temperature == 0:
        best = logits.take(values.argmax(keepdims=True))
        return TokenValues(np.ones(1, np.float32), best.ids)
    least = reached_by(maxima, sampling.top_k)
    if least > -np.inf:
        # a little low, as logits that differ in their last bits may have equal weights
        logits = at_least(logits, maxima, _lowered(least, highest, sampling))
    return _truncated(
        TokenValues(_tempered(logits.values, highest, sampling), logits.ids), sampling
    )


def _tempered(values: Float32, highest: np.float32, sampling: SamplingParams) -> Float32:
    """Return the weights of logits under a temperature."""
    weights: Float32 = values - highest
    if sampling.temperature != 1:
        weights /= np.float32(sampling.temperature)
    np.exp(weights, out=weights)
    return weights


def _likely(
    logits: TokenValues, sampling: SamplingParams, whole: Callable[[], TokenValues]
) -> Likely:
    """Return the likeliest tokens under rules without top-k."""
    maxima = group_maxima(logits.values)
    highest = maxima.max(initial=-np.inf)
    if not np.isfinite(highest):
        return likely_of(NO_VALUES)
    # without top-p nothing below min-p has to be known
    smallest = max(float(HEAD), sampling.min_p if sampling.top_p == 1 else 0)
    least = float(highest) + sampling.temperature * math.log(smallest)
    few = at_least(logits, maxima, _lowered(least, highest, sampling))
    head = likely_of(TokenValues(_tempered(few.values, highest, sampling), few.ids))
    mass = float(head.weights.sum(dtype=np.float64))
    rest = 0.0
    if smallest == HEAD:
        rest = _rest_at_most(logits.values, maxima, highest, mass, sampling)
    head = replace(head, rest=rest, whole=whole)
    if sampling.top_p < 1:
        head = _likely_nucleus(head, mass, sampling.top_p)
    if not sampling.min_p:
        return head
    kept = head.weights >= np.float32(sampling.min_p)
    return replace(
        head,
        ids=head.ids[kept],
        weights=head.weights[kept],
        rest=0.0 if sampling.min_p > HEAD else head.rest,
        sure=None if head.sure is None else head.sure[kept],
    )


def _rest_at_most(
    values: Float32,
    maxima: Float32,
    highest: np.float32,
    mass: float,
    sampling: SamplingParams,
) -> float:
    """Return what the weights of at most HEAD add up to, at most; mass: that of the others."""
    largest = np.minimum(_tempered(maxima, highest, sampling), HEAD)
    rest = PER_MAXIMUM * float(largest.sum(dtype=np.float64))
    if rest < LITTLE * mass:
        return rest
    total = float(_tempered(values, highest, sampling).sum())
    return max(total * (1 + ROUNDING) - mass, 0.0)


def _likely_nucleus(head: Likely, mass: float, top_p: float) -> Likely:
    """Leave of a row's likeliest tokens, of this mass, those that top-p may keep."""
    bins = _bins(head.weights)
    mass_of_bins = np.bincount(bins, head.weights)
    reached = mass_of_bins.cumsum()
    most_before = reached[bins] - head.weights
    least_before = (reached - mass_of_bins)[bins]
    border = top_p * (mass + head.rest) * (1 + BORDER)
    kept = least_before < border
    sure = most_before < top_p * mass * (1 - BORDER)
    # all tokens before the border, and the one that reaches it
    rest = 0.0 if border < mass else min(head.rest, border - mass + float(HEAD))
    return replace(head, ids=head.ids[kept], weights=head.weights[kept], rest=rest, sure=sure[kept])


def group_maxima(values: Float32) -> Float32:
    """Return the largest values of groups, each of at most PER_MAXIMUM.

    With `groups` of them, group g has every value whose place is g modulo `groups`; the places that
    are left over are the last group.
    """
    groups = len(values) // PER_MAXIMUM
    grouped = groups * PER_MAXIMUM
    maxima: Float32 = values[:grouped].reshape(PER_MAXIMUM, groups).max(0)
    if grouped == len(values):
        return maxima
    return np.append(maxima, values[grouped:].max())


def reached_by(maxima: Float32, count: int) -> float:
    """Return a bound that at least `count` values reach, and few more; -inf if that is not easy.

    maxima: of groups of the values, see `group_maxima`.
    """
    if not 0 < count < len(maxima):
        return -np.inf
    # so many groups have a value as large as the last of these maxima
    return float(np.partition(maxima, -count)[-count])


def at_least(logits: TokenValues, maxima: Float32, least: float) -> TokenValues:
    """Return those of at least `least`; maxima: see `group_maxima`."""
    values = logits.values
    groups = len(values) // PER_MAXIMUM
    reaching = np.flatnonzero(maxima[:groups] >= least)
    if len(reaching) * FEW > groups:
        return logits.take(np.flatnonzero(values >= least))
    places = (np.arange(PER_MAXIMUM)[:, None] * groups + reaching).ravel()
    places = np.append(places, np.arange(groups * PER_MAXIMUM, len(values)))
    return logits.take(places[values[places] >= least])


def _lowered(least: float, highest: np.float32, sampling: SamplingParams) -> float:
    """Return a bound of logits, lowered by their rounding on the way to weights."""
    return least - ROUNDING * (abs(float(highest)) + abs(least) + sampling.temperature)


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

    values `[k]`, at most 1.
    """
    total = float(values.sum(dtype=np.float64))
    # all tokens below this have less than the mass that is left out
    floor = np.float32((1 - top_p) * total / len(values) * (1 - ROUNDING))
    places = np.flatnonzero(values >= floor)
    bins = _bins(values[places])
    reached = np.bincount(bins, values[places]).cumsum()
    last = int(reached.searchsorted(top_p * total * (1 + BORDER)))
    places = places[bins <= last]
    ranked = -values[places]
    order = np.argsort(ranked, kind="stable")
    ranked = -ranked[order]
    inside = ranked.cumsum(dtype=SUM) - ranked < np.float32(top_p) * np.float32(total)
    return np.sort(places[order[inside]])


def _bins(weights: Float32) -> Int32:
    """Return the bins of weights by their leading bits, those of the largest weights first."""
    return (ONE - weights.view(np.int32)) >> BIN_SHIFT


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

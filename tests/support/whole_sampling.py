"""Sampling over whole vocabularies: all weights are sorted, and all tokens masked.

Slow and plain, as dflash-trt did it until November 2026: `decoding` must choose the same tokens.
"""

import math
from collections.abc import Sequence

import numpy as np

from dflash_trt.decoding.arrays import Bools, Float32
from dflash_trt.decoding.logits_processor import LogitsProcessor, truncate
from dflash_trt.decoding.sampling import (
    HEAD,
    NO_TOKEN,
    SamplingParams,
    _draw,
    _rows_and_noise_ids,
    _uniforms,
    hash_bases,
)


def sampled(
    processor: LogitsProcessor,
    logits: Float32,
    position: int,
    history: Sequence[int],
    allowed: Bools | None,
) -> int:
    """Return the token at a position, after all rules."""
    weights = weights_of(processor, logits, position, history, allowed)
    return sample(weights[None], [processor.sampling.seed], [position])[0]


def weights_of(
    processor: LogitsProcessor,
    logits: Float32,
    position: int,
    history: Sequence[int],
    allowed: Bools | None = None,
) -> Float32:
    """Return the weights of all tokens."""
    sampling = processor.sampling
    logits = logits.copy()
    if allowed is not None:
        logits[~allowed] = -np.inf
    for token, bias in sampling.logit_bias:
        logits[token] += np.float32(bias)
    if processor.needs_history:
        penalty = np.float32(sampling.repetition_penalty)
        seen = np.unique(np.array(history, np.int64))
        values = logits[seen]
        logits[seen] = np.where(values > 0, values / penalty, values * penalty)
        output = np.array(history[processor.prompt_tokens :], np.int64)
        tokens, counts = np.unique(output, return_counts=True)
        logits[tokens] -= np.float32(sampling.presence_penalty)
        logits[tokens] -= np.float32(sampling.frequency_penalty) * counts.astype(np.float32)
    banned = list[int]()
    if position - processor.prompt_tokens < sampling.min_tokens:
        banned += processor.stop_ids
    for *before, last in sampling.bad_words:
        if list(history[len(history) - len(before) :]) == before:
            banned.append(last)
    if banned:
        remaining = logits.copy()
        remaining[banned] = -np.inf
        if np.isfinite(remaining).any():
            logits = remaining
    return by_temperature(logits, sampling)


def by_temperature(logits: Float32, sampling: SamplingParams) -> Float32:
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


def sample(weights: Float32, seeds: Sequence[int], positions: Sequence[int]) -> list[int]:
    """Sample a token for each row of `weights` `[m, vocab]`; NO_TOKEN for a row of NaN."""
    m, vocab = weights.shape
    in_head = weights > HEAD
    flat = np.flatnonzero(in_head)
    rows = flat // vocab
    head = flat - rows * vocab
    head_weights = weights.ravel()[flat]
    rest = weights.sum(1, dtype=np.float64) - np.bincount(rows, head_weights, m)
    every, shared = _rows_and_noise_ids(m)
    bases = hash_bases(seeds, positions)[np.concatenate((rows, every, every))]
    uniforms = _uniforms(np.concatenate((head, shared)), bases)
    logs = np.log(uniforms)
    scores = head_weights / logs[: len(head)]
    rest_scores = (rest / logs[-2 * m : -m]).tolist()
    ends = rows.searchsorted(every, "right").tolist()
    tokens: list[int] = []
    for i, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if start == end or math.isnan(rest_scores[i]):
            tokens.append(NO_TOKEN)
            continue
        best = start + int(scores[start:end].argmin())
        token = None
        if rest_scores[i] < scores[best]:
            others = np.where(in_head[i], np.float32(0), weights[i])
            token = _draw(others, float(uniforms[i - m]))
        tokens.append(int(head[best]) if token is None else token)
    return tokens

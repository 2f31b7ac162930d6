"""Weights, noise and draws of a sampled token.

Drafts change no sampled text, seed by seed (test_lossless.py): what holds of one draw holds of all.
"""

from typing import Any

import dflash.model as zlab
import numpy as np
import pytest
import torch

from dflash_trt.decoding import SamplingParams
from dflash_trt.decoding.logits_processor import truncate, weights
from dflash_trt.decoding.sampling import NO_TOKEN, TokenValues, likely_of, noise, sample
from tests.support.whole_sampling import tempered

VOCAB = 20
CRITICAL_Z = 3.719  # chi-square values are compared with the quantile at 1 - 1e-4
CUT = SamplingParams(0.8, top_k=8, top_p=0.9, min_p=0.05)
Array = np.ndarray[Any, Any]


def table(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).normal(0, 1.2, (*shape, VOCAB)).astype(np.float32)


def distribution(logits: Array, sampling: SamplingParams) -> Array:
    kept = spread(weights(TokenValues(logits), sampling), len(logits)).astype(np.float64)
    return kept / kept.sum()


def spread(weights: TokenValues, vocab: int = VOCAB) -> Array:
    """Return the weights of all tokens."""
    if weights.ids is None:
        return weights.values
    whole = np.zeros(vocab, np.float32)
    whole[weights.ids] = weights.values
    return whole


def chi_square(counts: Array, probs: Array) -> float:
    """Return by how many standard deviations the statistic is too large (Wilson-Hilferty).

    counts, probs `[groups, VOCAB]`: one distribution a group; cells that expect fewer than 5 draws
    are joined. A token of probability 0 may never be drawn.
    """
    statistic, freedom = 0.0, 0
    for observed, p in zip(counts, probs, strict=True):
        assert not observed[p == 0].any(), "a token outside the distribution was drawn"
        expected = p * observed.sum()
        small = expected < 5
        cells = [*zip(observed[~small], expected[~small], strict=True)]
        if expected[small].sum() >= 5:
            cells.append((observed[small].sum(), expected[small].sum()))
        if len(cells) > 1:
            kept = sum(e for _, e in cells)
            total = sum(o for o, _ in cells)
            statistic += sum((o - e * total / kept) ** 2 / (e * total / kept) for o, e in cells)
            freedom += len(cells) - 1
    assert freedom > 0, "too few draws"
    spread = 2 / (9 * freedom)
    return float(((statistic / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 5, VOCAB, 1000])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.5, 1e-6])
def test_distribution_is_zlabs(temperature: float, top_k: int, top_p: float) -> None:
    for seed in range(20):
        logits = 3 * table(100 + seed)
        ours = distribution(logits, SamplingParams(temperature, top_k, top_p))
        theirs = zlab._sampling_probs(torch.from_numpy(logits), temperature, top_p, top_k).numpy()
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
        assert ours.sum() == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (SamplingParams(1.0), [0.5, 0.3, 0.15, 0.05]),
        (SamplingParams(1.0, top_k=2), [0.625, 0.375, 0, 0]),
        # 0.5 alone is short of 0.6; the token that reaches the mass is kept
        (SamplingParams(1.0, top_p=0.6), [0.625, 0.375, 0, 0]),
        # top-p counts the mass that top-k left: 0.625 and 0.375
        (SamplingParams(1.0, top_k=2, top_p=0.6), [1, 0, 0, 0]),
        (SamplingParams(1.0, min_p=0.5), [0.625, 0.375, 0, 0]),
        (SamplingParams(0.5), [0.25 / 0.365, 0.09 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365]),
        (SamplingParams(), [1, 0, 0, 0]),
    ],
)
def test_distribution_by_hand(sampling: SamplingParams, expected: list[float]) -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    np.testing.assert_allclose(distribution(logits, sampling), expected, 1e-5)


def test_extreme_logits_stay_a_distribution() -> None:
    logits = np.array([-1e30, 0.0, 1e30, -np.inf], np.float32)
    for sampling in (SamplingParams(1e-4), SamplingParams(1.0, 3, 0.5), SamplingParams(100.0)):
        assert distribution(logits, sampling).tolist() == [0, 0, 1, 0]


def test_many_lines_are_cut_as_each_alone() -> None:
    lines = tempered(table(1, 12), [0.9] * 12).reshape(3, 4, VOCAB)
    sampling = SamplingParams(0.9, top_k=9, top_p=0.8, min_p=0.1)
    alone = np.array([[truncate(line.copy(), sampling) for line in each] for each in lines])
    assert (truncate(lines.copy(), sampling) == alone).all()
    assert 1 < (alone > 0).sum(-1).mean() < 9


def test_rows_are_sampled_as_if_alone() -> None:
    """A row without numbers fails no other."""
    rng = np.random.default_rng(0)
    for vocab in (2, 31, 512, 5000):
        logits = rng.normal(0, 3, (40, vocab)).astype(np.float32)
        temperatures = rng.uniform(0.2, 3, 40).tolist()
        w = tempered(logits, temperatures)
        logits[7] = np.nan
        rows = [
            likely_of(weights(TokenValues(row), SamplingParams(temperature)))
            for row, temperature in zip(logits, temperatures, strict=True)
        ]
        sampled = sample(rows, range(40), range(100, 140))
        for i, token in enumerate(sampled):
            assert (sample([likely_of(TokenValues(w[i]))], [i], [100 + i]) == [token]) == (i != 7)
        assert sampled[7] == NO_TOKEN


@pytest.mark.parametrize("by", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, -1, 0), (0, 1, -1), (2, 7, 0)])
@pytest.mark.parametrize("seed", [0, 2**31 - 1, 2**62])
def test_noise_is_independent(by: tuple[int, int, int], seed: int) -> None:
    """Neighbors are seeds, positions and tokens: 40,000 pairs, all values equally likely."""
    seeds, positions, ids = range(seed, seed + 20), range(100, 140), np.arange(50)
    each, other = (
        np.array(
            [noise(s + ds, [p + dp for p in positions], np.tile(ids + di, (40, 1))) for s in seeds]
        )
        for ds, dp, di in ((0, 0, 0), by)
    )
    a, b = (np.exp(-np.exp(-x)).ravel() for x in (each, other))
    cells = np.bincount((a * 8).astype(int) * 8 + (b * 8).astype(int), minlength=64)
    assert chi_square(cells[None], np.full((1, 64), 1 / 64)) < CRITICAL_Z


RULES = [
    SamplingParams(1.0),
    CUT,
    SamplingParams(1.0, top_k=4),
    SamplingParams(0.7, top_p=0.8),
    SamplingParams(1.3, min_p=0.1),
    SamplingParams(0.6, top_k=20, top_p=0.95),
]


@pytest.mark.parametrize("sampling", RULES)
def test_draws_follow_the_distribution(sampling: SamplingParams) -> None:
    rows = [weights(TokenValues(line), sampling) for line in table(3, 5)]
    likely = [likely_of(row) for row in rows]
    drawn = np.array([sample(likely, [seed] * 5, range(5)) for seed in range(4000)])
    counts = np.stack([np.bincount(column, minlength=VOCAB) for column in drawn.T])
    lines = np.stack([spread(row) for row in rows])
    assert chi_square(counts, lines / lines.sum(-1, keepdims=True)) < CRITICAL_Z


def test_tokens_of_little_weight_have_theirs() -> None:
    """Thousands of tokens share most of the weight and their noise."""
    w = np.full(8_000, 1e-4, np.float32)
    w[:4] = [1.0, 0.3, 0.1, 0.02]
    w[4::2] *= 2
    w[5::8] = 0  # never sampled
    seeds = np.repeat(np.arange(2000), 10).tolist()
    row = [likely_of(TokenValues(w))]
    sampled = np.array([sample(row, [seed], [i % 10])[0] for i, seed in enumerate(seeds)])
    ids = np.arange(len(w))
    for among in (ids % 16, ids // 500):  # tokens of all numbers, and neighbors
        groups = np.where(ids < 4, ids, 4 + among)
        counts, probs = np.bincount(groups[sampled], minlength=20), np.bincount(groups, w)
        assert chi_square(counts[None], probs[None] / probs.sum()) < CRITICAL_Z

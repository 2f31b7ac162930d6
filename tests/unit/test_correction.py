"""Drafts weighed by token pairs: the formula, its limits, and a process that it gets right."""

from __future__ import annotations

import tracemalloc
from bisect import bisect_right
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from dflash_trt.decoding.speculation.correction import CELLS, LEAST, READY, SMOOTHING, Pairs
from dflash_trt.decoding.speculation.path import best_chain, best_path


def block(numbers: np.random.Generator, n: int, depth: int, tokens: np.ndarray, k: int):
    """Candidates, different within a place, and their probabilities, best first."""
    ids = np.array([[numbers.permutation(tokens)[:k] for _ in range(depth)] for _ in range(n)])
    probs = -np.sort(-numbers.dirichlet(np.full(k, 0.4), (n, depth)))
    return ids, probs.astype(np.float32)


@pytest.mark.parametrize("vocabulary", [64, 200_000])
def test_the_formula(vocabulary: int) -> None:
    """Against dictionaries, for text in which some tokens are common and some are missing."""
    numbers = np.random.default_rng(7)
    tokens = numbers.choice(vocabulary, 24, replace=False)
    text = tokens[numbers.geometric(0.2, 900) % 20].tolist()
    pairs = Pairs()
    for start in range(0, len(text) - 1, 3):  # in runs, the token before in front
        pairs.observe(text[start : start + 4])
    following, seen = Counter(pairwise(text)), Counter(text[:-1])
    ids, probs = block(numbers, 3, 5, tokens, 6)
    found = pairs.reweigh(ids, probs)

    def chance(x: int, y: int) -> float:
        spread = (seen[x] + 0.5) / (len(text) - 1)
        return (following[y, x] + SMOOTHING * spread) / (seen[y] + SMOOTHING)

    corrected = 0
    for row in range(3):
        for d in range(1, 5):
            here = list(zip(ids[row, d].tolist(), probs[row, d].tolist(), strict=True))
            before = list(zip(ids[row, d - 1].tolist(), probs[row, d - 1].tolist(), strict=True))
            known = [(y, q) for y, q in before if seen[y] >= LEAST]
            for i, (y, _) in enumerate(before):
                line = [q for _, q in here]
                if seen[y] >= LEAST:
                    implied = [sum(q * chance(x, each) for each, q in known) for x, _ in here]
                    line = [
                        q * chance(x, y) / mix for (x, q), mix in zip(here, implied, strict=True)
                    ]
                    corrected += 1
                expected = np.array(line) / sum(line)
                np.testing.assert_allclose(found[row, d, i], expected, atol=1e-5)
    assert 40 < corrected < 3 * 4 * 6  # of both kinds


def test_probabilities_keep_their_sums() -> None:
    """And the first place, behind the anchor that the drafter knew, stays as it was."""
    numbers = np.random.default_rng(0)
    pairs = Pairs()
    pairs.observe(numbers.integers(0, 30, 2000).tolist())
    ids, probs = block(numbers, 4, 7, np.arange(30), 8)
    probs[:, 3:] *= 0.7  # as if cut from more candidates
    probs[3, 4:] = 0.0  # a row with fewer drafts than the others
    ids[3, 4:] = 0
    found = pairs.reweigh(ids, probs)
    assert found.shape == (4, 7, 8, 8)
    assert found.dtype == np.float32
    expected = np.repeat(probs.sum(-1)[:, :, None], 8, axis=2)
    np.testing.assert_allclose(found.sum(-1), expected, atol=1e-5)
    assert (found >= 0).all()
    np.testing.assert_array_equal(found[:, 0], np.repeat(probs[:, 0, None], 8, axis=1))


def test_one_place_and_one_candidate() -> None:
    pairs = Pairs()
    pairs.observe([1, 2] * 100)
    one = np.ones((1, 1, 1), np.float32)
    np.testing.assert_allclose(pairs.reweigh(np.array([[[1]]]), one)[0, 0], [[1.0]])
    found = pairs.reweigh(np.array([[[1], [2]]]), np.ones((1, 2, 1), np.float32))
    np.testing.assert_allclose(found[0, 1], [[1.0]])


def test_what_was_not_seen_changes_nothing() -> None:
    numbers = np.random.default_rng(1)
    pairs = Pairs()
    ids, probs = block(numbers, 2, 6, np.arange(100, 140), 8)
    as_it_was = np.repeat(probs[:, :, None], 8, axis=2)
    np.testing.assert_allclose(pairs.reweigh(ids, probs), as_it_was, rtol=1e-5)
    pairs.observe(numbers.integers(0, 90, 3000).tolist())  # of other tokens
    np.testing.assert_allclose(pairs.reweigh(ids, probs), as_it_was, rtol=1e-5)


def test_ready_after_some_pairs() -> None:
    pairs = Pairs()
    pairs.observe([1])  # no pair
    pairs.observe([1] * READY)
    assert not pairs.ready
    pairs.observe([1, 2])
    assert pairs.ready


@pytest.mark.parametrize("seed", range(3))
def test_a_process_of_pairs_is_found(seed: int) -> None:
    """A drafter that knows each place's distribution exactly, but not what the others became.

    The correction then has to say what the process does after each token: by marginals alone the
    chain goes through pairs that hardly ever occur.
    """
    numbers = np.random.default_rng(seed)
    states, depth = 12, 6
    steps = 0.95 * numbers.dirichlet(np.full(states, 0.3), states) + 0.05 / states
    cumulative = steps.cumsum(1).tolist()
    text = [0]
    for uniform in numbers.random(150_000).tolist():
        text.append(min(bisect_right(cumulative[text[-1]], uniform), states - 1))
    pairs = Pairs()
    pairs.observe(text)
    marginals = [steps]  # [anchor, token] of each place
    for _ in range(depth - 1):
        marginals.append(marginals[-1] @ steps)
    probs = np.stack(marginals, 1).astype(np.float32)
    ids = np.tile(np.arange(states), (states, depth, 1))
    found = pairs.reweigh(ids, probs)
    for anchor in range(states):
        for d in range(1, depth):
            np.testing.assert_allclose(found[anchor, d], steps, atol=0.03)

    def kept(anchor: int, chain: list[int]) -> float:
        """Drafts kept on average: exact."""
        chances = [steps[y, x] for y, x in pairwise([anchor, *chain])]
        return float(np.cumprod(chances).sum())

    alone = [kept(a, probs[a].argmax(-1).tolist()) for a in range(states)]
    corrected = [kept(a, best_chain(ids[a], found[a])[0]) for a in range(states)]
    assert sum(corrected) > 1.05 * sum(alone)


def test_a_wrong_chain_becomes_right() -> None:
    """`1 3` and `2 4` are what is written; the drafter, unsure which, would write `1 4`."""
    pairs = Pairs()
    pairs.observe([1, 3, 2, 4] * 50)
    ids = np.array([[[1, 2], [4, 3]]])
    probs = np.array([[[0.6, 0.4], [0.55, 0.45]]], np.float32)
    tokens, chances = best_chain(ids[0], pairs.reweigh(ids, probs)[0])
    assert tokens == [1, 3]
    assert chances[0] == pytest.approx(0.6)
    assert chances[1] > 0.8


def test_old_pairs_are_forgotten() -> None:
    pairs = Pairs()
    ids = np.array([[[1, 5], [2, 3]]])
    probs = np.full((1, 2, 2), 0.5, np.float32)
    pairs.observe([1, 2] * (CELLS // 8))
    pairs.observe([5, 3] * 100)
    assert pairs.reweigh(ids, probs)[0, 1, 0, 0] > 0.9
    pairs.observe([7, 8])  # seen once
    for _ in range(24):
        pairs.observe([1, 3] * (CELLS // 8))
        pairs.observe([5, 2] * 100)
    assert pairs.reweigh(ids, probs)[0, 1, 0, 0] < 0.1
    ids[0, 0, 0] = 7
    np.testing.assert_allclose(pairs.reweigh(ids, probs)[0, 1, 0], [0.5, 0.5], atol=1e-6)


def test_memory_is_bounded() -> None:
    numbers = np.random.default_rng(3)
    tracemalloc.start()
    try:
        pairs = Pairs()
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(20):
            pairs.observe(numbers.integers(0, 150_000, CELLS // 16).tolist())
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert before >= 8 * CELLS
    assert after - before < 10_000
    assert pairs.ready


def test_chain_is_the_path_of_best_pairs() -> None:
    """As `best_path` takes it for DFlash 2's scores, with each step's probability."""
    numbers = np.random.default_rng(4)
    ids, _ = block(numbers, 20, 7, np.arange(50), 8)
    weighed = numbers.dirichlet(np.full(8, 0.5), (20, 7, 8)).astype(np.float32)
    weighed[:, 0] = weighed[:, 0, :1]
    paths = best_path(ids, weighed).tolist()
    for row in range(20):
        tokens, probs = best_chain(ids[row], weighed[row])
        assert tokens == paths[row]
        taken = 0
        for place, token in enumerate(tokens):
            assert probs[place] == weighed[row, place, taken].max()
            taken = ids[row, place].tolist().index(token)

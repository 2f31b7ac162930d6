"""Prompt lookup's index against a search through the whole text; what becomes of proposals."""

import random
from itertools import pairwise

import pytest

from dflash_trt.speculation.estimator import MATCHES, AcceptanceEstimator
from dflash_trt.speculation.lookup import MAX_MATCH, NgramIndex
from tests.support.proposals import chain, looked_up


def searched(text: list[int], most: int) -> tuple[int, list[int]]:
    for length in (3, 2, 1):
        for start in range(len(text) - 1, length - 1, -1):
            if len(text) > length and text[start - length : start] == text[-length:]:
                while length < min(start, MAX_MATCH) and (
                    text[start - length - 1 : start] == text[-length - 1 :]
                ):
                    length += 1
                copied = list(text)
                for place in range(start, start + most):
                    copied.append(copied[place])
                return length, copied[len(text) :]
    return 0, []


@pytest.mark.parametrize("vocabulary", [2, 5, 40])
def test_as_searched(vocabulary: int) -> None:
    numbers = random.Random(vocabulary)
    for _ in range(10):
        index, text = NgramIndex(), []
        while len(text) < 150:
            piece = [numbers.randrange(vocabulary) for _ in range(numbers.randrange(6))]
            if text and numbers.random() < 0.3:
                start = numbers.randrange(len(text))
                piece = text[start : start + 25]
            index.extend(piece)
            text += piece
            most = numbers.randrange(20)
            assert index.find(most) == searched(text, most)
            assert len(index) == len(text)


def test_each_kind_of_copy_is_learned_by_itself() -> None:
    estimator, numbers = AcceptanceEstimator(7), random.Random(0)
    kinds = [looked_up(match) for match in MATCHES]
    kinds += [looked_up(5)._replace(sampled=True)]
    before = [estimator.expected(kind) for kind in kinds]
    for _ in range(2000):
        right = 0
        while right < 7 and numbers.random() < 0.6:
            right += 1
        estimator.observe(looked_up(6), right)
    after = [estimator.expected(kind) for kind in kinds]
    at = MATCHES.index(5)
    assert [i for i in range(len(kinds)) if before[i] != after[i]] == [at]
    assert estimator.expected(looked_up(7)) == after[at] != estimator.expected(looked_up(8))
    chances = [b - a for a, b in pairwise(after[at])]
    assert chances == sorted(chances, reverse=True)  # no place is likelier than the one before
    assert sum(chances) == pytest.approx(sum(0.6**i for i in range(1, 8)), abs=0.6)


def test_what_was_long_ago_is_forgotten() -> None:
    for proposal in (looked_up(2, 5), chain([0.9**k for k in range(1, 6)])):
        estimator = AcceptanceEstimator(5)
        for accepted, low, high in ((5, 4.5, 5.0), (0, 0.0, 0.15)):
            for _ in range(400):
                estimator.observe(proposal, accepted)
            assert low <= estimator.expected(proposal)[-1] <= high

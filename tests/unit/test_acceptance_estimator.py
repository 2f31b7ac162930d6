"""Prompt lookup's index against a search through the whole text, and its record."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from dflash_trt.decoding.speculation.lookup import BUCKETS, MEASURED, Record, Suffixes


def searched(text: list[int], most: int) -> tuple[int, list[int]]:
    """What `Suffixes.find` says, found by looking everywhere."""
    for length in (3, 2, 1):
        for start in range(len(text) - 1, length - 1, -1):
            if len(text) > length and text[start - length : start] == text[-length:]:
                while length < min(start, MEASURED) and (
                    text[start - length - 1 : start] == text[-length - 1 :]
                ):
                    length += 1
                copied = list(text)
                for place in range(start, start + most):
                    copied.append(copied[place])
                return length, copied[len(text) :]
    return 0, []


@pytest.mark.parametrize(
    ("text", "most", "expected"),
    [
        ([1, 2, 3, 9, 1, 2, 3], 2, (3, [9, 1])),
        ([1, 2, 3, 9, 1, 2, 3], 6, (3, [9, 1, 2, 3, 9, 1])),  # on with its own copy
        ([7, 3, 5, 7, 3, 6, 7, 3], 1, (2, [6])),  # the latest
        ([4, 7, 3, 5, 8, 3, 6, 4, 7, 3], 1, (3, [5])),  # but the longest first
        ([1, 1, 1, 1], 3, (3, [1, 1, 1])),
        ([5, 1, 2, 1, 2], 5, (2, [1, 2, 1, 2, 1])),
        ([9, *range(20, 40), 8, *range(20, 40)], 1, (MEASURED, [8])),
        ([1, 2, 3], 3, (0, [])),
        ([1], 3, (0, [])),
        ([], 3, (0, [])),
        ([0, 0], 0, (1, [])),
    ],
)
def test_copies_what_followed(text: list[int], most: int, expected: tuple[int, list[int]]) -> None:
    assert Suffixes(text).find(most) == expected == searched(text, most)


@pytest.mark.parametrize("vocabulary", [2, 5, 40])
def test_as_searched(vocabulary: int) -> None:
    """Random texts with repeats, appended in pieces of random size."""
    numbers = random.Random(vocabulary)
    for _ in range(10):
        index, text = Suffixes(), []
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


def gains(expected: list[float]) -> list[float]:
    return [b - a for a, b in pairwise(expected)]


def test_record_starts_from_a_guess_that_rises_with_the_match() -> None:
    record = Record(15)
    means = [record.expected(length, 7)[-1] for length in range(1, 20)]
    assert means == sorted(means)
    assert 0.5 < means[0] < 1.3  # published means at temperature 0.8 and greedy
    assert 2.8 < means[5] < 5.8
    assert len(record.expected(1, 15)) == 1 + 15
    assert record.expected(1, 4) == record.expected(1, 15)[:5]


def test_record_learns_each_bucket_by_itself() -> None:
    record, numbers = Record(7), random.Random(0)
    before = [record.expected(length, 7) for length in BUCKETS]
    for _ in range(2000):
        right = 0
        while right < 7 and numbers.random() < 0.6:
            right += 1
        record.observe(6, 7, right)
    after = [record.expected(length, 7) for length in BUCKETS]
    assert [i for i in range(len(BUCKETS)) if before[i] != after[i]] == [BUCKETS.index(5)]
    assert record.expected(7, 7) == after[BUCKETS.index(5)] != record.expected(8, 7)
    chances = gains(after[BUCKETS.index(5)])
    assert chances == sorted(chances, reverse=True)  # no place is likelier than the one before
    assert chances[0] == pytest.approx(0.6, abs=0.2)
    assert sum(chances) == pytest.approx(sum(0.6**i for i in range(1, 8)), abs=0.6)


def test_record_forgets() -> None:
    record = Record(5)
    for _ in range(300):
        record.observe(2, 5, 5)
    assert record.expected(2, 5)[-1] > 4.9
    for _ in range(300):
        record.observe(2, 5, 0)
    assert record.expected(2, 5)[-1] < 0.05


def test_record_learns_only_as_far_as_was_copied() -> None:
    record = Record(5)
    before = gains(record.expected(1, 5))
    record.observe(1, 2, 2)
    after = gains(record.expected(1, 5))
    assert after[0] > before[0]
    assert after[2] / after[1] == pytest.approx(before[2] / before[1])

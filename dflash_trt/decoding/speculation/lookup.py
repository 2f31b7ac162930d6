"""Prompt lookup: drafts copied from where the last tokens stood before (Saxena 2023, "prompt lookup
decoding"; `--method lookup`), and what became of them."""

import time
from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from operator import mul

import numpy as np

from dflash_trt.decoding.messages import (
    FREED,
    NO_DRAFT,
    DraftOutput,
    VerifyInput,
    VerifyOutput,
    slot_copies,
)

MEASURED = 16  # tokens of a match that are looked at: a long one promises much

MEMORY = 0.98  # weight of the past at each round: about the last 50 count
PRIOR = 2.0  # rounds that the chances below are worth
BUCKETS = (1, 2, 3, 4, 5, 8, 16)  # the shortest match of each
CHANCES = (0.48, 0.69, 0.74, 0.78, 0.87, 0.87, 0.95)  # that a copied token is right, at the start
DRAWN_CHANCES = (0.33, 0.55, 0.63, 0.67, 0.74, 0.8, 0.9)  # the same at a temperature
DOUBT = 0.5  # times that, where the drafter says otherwise


class Suffixes:
    """A text, and where each run of one, two and three of its tokens was last followed by another.

    As in transformers' prompt_lookup, three is the longest: five found nothing better (a replay of
    the demo pair's texts, 3.36 tokens a round by either).
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._text: list[int] = []
        # by run, which is one number: so many tuples would be work for the garbage collector
        self._after: tuple[dict[int, int], dict[int, int], dict[int, int]] = ({}, {}, {})
        self._end = (-1, -1, -1)  # the runs of the last one, two and three tokens
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self._text)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens; about 0.5 us each."""
        text, (after_one, after_two, after_three) = self._text, self._after
        one, two, three = self._end
        for place, token in enumerate(tokens, len(text)):
            after_one[one] = after_two[two] = after_three[three] = place
            one, two, three = token, one << 32 | token, two << 32 | token
            text.append(token)
        self._end = one, two, three

    def find(self, most: int) -> tuple[int, list[int]]:
        """The length of a match and the `most` tokens that followed it.

        Of the earlier copies of the text's end, those of its last three tokens count if there are
        any, else of two, else of one; of these the latest. How far it is alike is measured up to
        `MEASURED`. What runs into the end of the text goes on with its own copy, as a loop does.
        (0, []) if even the last token is new.
        """
        text, (after_one, after_two, after_three) = self._text, self._after
        one, two, three = self._end
        length, start = 3, after_three.get(three)
        if start is None:
            length, start = 2, after_two.get(two)
        if start is None:
            length, start = 1, after_one.get(one)
        if start is None:
            return 0, []
        limit = min(start, MEASURED)
        while length < limit and text[start - 1 - length] == text[-1 - length]:
            length += 1
        found = text[start : start + most]
        while len(found) < most:
            found += found[: most - len(found)]
        return length, found


class Record:
    """How many copied tokens were right, by the length of the match and by place."""

    def __init__(self, most: int, drawn: bool = False, doubted: bool = False) -> None:
        """most: tokens copied in a round; drawn: behind texts of requests with a temperature;
        doubted: those of which the drafter says otherwise."""
        # token j was reached / kept, given that all before it were
        self._reached = [[PRIOR] * most for _ in BUCKETS]
        chances, doubt = DRAWN_CHANCES if drawn else CHANCES, DOUBT if doubted else 1.0
        self._kept = [[PRIOR * chance * doubt] * most for chance in chances]
        self._expected: dict[int, list[float]] = {}  # asked far more often than it changes

    def expected(self, length: int, count: int) -> list[float]:
        """Tokens kept on average of the first 0, 1, .. count copied behind a match of `length`."""
        bucket = bisect_right(BUCKETS, length) - 1
        if bucket not in self._expected:
            lines = zip(self._kept[bucket], self._reached[bucket], strict=True)
            chances = accumulate((kept / reached for kept, reached in lines), mul)
            self._expected[bucket] = [*accumulate(chances, initial=0.0)]
        expected = self._expected[bucket]
        return expected if len(expected) == count + 1 else expected[: count + 1]

    def observe(self, length: int, drafted: int, accepted: int) -> None:
        """Learn from a round that kept `accepted` of `drafted` tokens copied behind a match."""
        bucket = bisect_right(BUCKETS, length) - 1
        reached, kept = self._reached[bucket], self._kept[bucket]
        self._expected.pop(bucket, None)
        for j in range(min(accepted + 1, drafted)):
            reached[j] = reached[j] * MEMORY + 1.0
            kept[j] = kept[j] * MEMORY + (j < accepted)


class PromptLookup:
    """A `rounds.Propose` that keeps the tokens of each cache row."""

    def __init__(self) -> None:
        self._texts: dict[int, Suffixes] = {}

    def __call__(self, x: VerifyInput, checked: VerifyOutput) -> DraftOutput:
        start = time.perf_counter()
        first_row, wanted, _, *moves = x.batch.tolist()
        for source, destination, _ in slot_copies(moves):
            if (text := self._texts.pop(source, None)) and destination != FREED:
                self._texts[destination] = text
        lines = zip(x.rows.tolist(), x.tokens.tolist(), checked.results.tolist(), strict=True)
        drafts = []
        for row, ((_, forced, place, budget), tokens, (accepted, token, *_)) in enumerate(lines):
            if place == 0 or first_row + row not in self._texts:
                self._texts[first_row + row] = Suffixes()
            text = self._texts[first_row + row]
            committed = tokens[: forced + max(accepted, 0)] + ([token] if budget else [])
            text.extend(committed[max(len(text) - place, 0) :])
            found = text.find(wanted)[1] if budget else []
            drafts.append(found or [NO_DRAFT] * wanted)
        ids = np.array(drafts)
        certain = np.ones((*ids.shape, 1), np.float32)
        return DraftOutput(ids[..., None], certain, time.perf_counter() - start)

"""The bookkeeping of kept prefixes against a model that knows whole texts and nothing of blocks."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dflash_trt.decoding.prefix_cache import BLOCK, PrefixCache
from dflash_trt.engines import KEPT

MOST = 6
OWNERS = ("first group", "second group")
SALTS = ("", *(f"salts that begin alike, number {number}" for number in range(2)))
WORDS = [[word] * BLOCK for word in range(3)]  # texts of few words often begin alike
TEXTS = st.builds(
    lambda words, rest: [token for word in words for token in WORDS[word]] + [9] * rest,
    st.lists(st.integers(0, 2), max_size=4),
    st.integers(0, BLOCK - 1),
)
Stored = tuple[str, list[int], bool]  # the salt, the text up to its end, whether for both models


class CacheModel(RuleBasedStateMachine):
    """Two groups with steps under way; what the engines have is told by instructions alone."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache(MOST)
        self.engines: dict[int, Stored] = {}  # what steps that have ended stored
        self.to_do: dict[str, list[tuple[int, Stored | None]]] = {owner: [] for owner in OWNERS}
        self.used: dict[str, set[int]] = {owner: set() for owner in OWNERS}  # copied by its step

    @rule(
        owner=st.sampled_from(OWNERS),
        salt=st.sampled_from(SALTS),
        text=TEXTS,
        drafted=st.booleans(),
    )
    def find(self, owner: str, salt: str, text: list[int], drafted: bool) -> None:
        found = self.cache.find(owner, salt, text, drafted=drafted)
        assert len(found) * BLOCK < max(len(text), 1)
        mine = {**self.engines, **{number: what for number, what in self.to_do[owner] if what}}
        for end, block in enumerate(found, 1):
            kept_salt, kept, seen = mine[block.number]
            assert (kept_salt, kept) == (salt, text[: end * BLOCK])
            assert seen or not drafted
            assert seen == block.drafted
        self.used[owner] |= {block.number for block in found}
        # what another group stores is not there until it has, not even for the target alone
        others = {n for each in OWNERS if each != owner for n, what in self.to_do[each] if what}
        there = {number: what for number, what in mine.items() if number not in others}
        assert len(found) == self._longest(there, salt, text[:-1], drafted)

    def _longest(self, mine: dict[int, Stored], salt: str, text: list[int], drafted: bool) -> int:
        """What the cache has not given up of it, from the first block on."""
        numbers = {block.number for block in self.cache._blocks.values()}
        whole = [
            what[1]
            for number, what in mine.items()
            if number in numbers and what[0] == salt and (what[2] or not drafted)
        ]
        count = 0
        while text[: (count + 1) * BLOCK] in whole and len(text) >= (count + 1) * BLOCK:
            count += 1
        return count

    @rule(owner=st.sampled_from(OWNERS), salt=st.sampled_from(SALTS), text=TEXTS, data=st.data())
    def keep(self, owner: str, salt: str, text: list[int], data: Any) -> None:
        seen = data.draw(st.integers(0, len(text)))
        dropped, stored = self.cache.keep(owner, salt, text, seen)
        for number in dropped:
            assert not any(number in used for used in self.used.values())
        self.to_do[owner] += [(number, None) for number in dropped]
        for number, start in stored:
            end = start + BLOCK
            assert number >= KEPT
            self.to_do[owner].append((number, (salt, text[:end], end <= seen)))
            self.used[owner].add(number)

    @rule(owner=st.sampled_from(OWNERS))
    def done(self, owner: str) -> None:
        self._step(owner)
        self.cache.done(owner)

    @rule(owner=st.sampled_from(OWNERS), count=st.integers(0, 3))
    def fail(self, owner: str, count: int) -> None:
        """After so many of the instructions."""
        self._step(owner, count)
        self.cache.clear(owner)
        assert not len(self.cache)

    @rule(held=st.booleans())
    def hold(self, held: bool) -> None:
        """Another drafter is loaded; what steps under way copy stays until they end."""
        self.cache.hold(held)
        assert not (held and len(self.cache))

    def _step(self, owner: str, count: int | None = None) -> None:
        for number, what in self.to_do[owner][:count]:
            if what is None:
                self.engines.pop(number, None)
            else:
                self.engines[number] = what
        self.to_do[owner], self.used[owner] = [], set()

    @invariant()
    def stays_within_its_size(self) -> None:
        assert len(self.cache) <= MOST

    def teardown(self) -> None:
        """What the cache has given up leaves the engines, too."""
        for owner in OWNERS:
            self.done(owner)
        dropped, _ = self.cache.keep("first group", "", [], 0)
        numbers = {block.number for block in self.cache._blocks.values()}
        assert {*self.engines} - {*dropped} == numbers

"""Which blocks of kept prefixes go and which stay; `test_scheduler.py` has any order of events."""

from __future__ import annotations

from scheduler_model import WORDS

from dflash_trt.decoding.prefix_cache import BLOCK, PrefixCache
from dflash_trt.engines import KEPT


def test_the_least_recently_used_goes_and_never_before_what_follows_it() -> None:
    cache = PrefixCache(4)
    old, new = WORDS[0] + WORDS[1], WORDS[2] + WORDS[1]
    for text in (old, new):
        cache.keep("group", "", text, len(text))
    cache.done("group")
    assert len(cache.find("group", "", [*old, 9], drafted=True)) == 2  # used again
    cache.done("group")
    cache.keep("group", "", WORDS[1], BLOCK)
    cache.done("group")
    lengths = [len(cache.find("group", "", [*text, 9], drafted=True)) for text in (old, new)]
    assert lengths == [2, 1]


def test_what_another_group_stores_is_there_when_its_step_has_ended() -> None:
    cache, text = PrefixCache(4), [*WORDS[0], 9]
    cache.keep("first", "", text, BLOCK)
    assert len(cache.find("first", "", text, drafted=True)) == 1
    assert not cache.find("second", "", text, drafted=True)
    cache.done("first")
    assert len(cache.find("second", "", text, drafted=True)) == 1


def test_a_block_that_is_being_copied_stays() -> None:
    cache, text = PrefixCache(1), [*WORDS[0], 9]
    cache.keep("first", "", text, BLOCK)
    cache.done("first")
    (block,) = cache.find("second", "", text, drafted=True)
    assert cache.keep("first", "", WORDS[1], BLOCK) == ([], [])
    cache.done("second")
    assert cache.keep("first", "", WORDS[1], BLOCK) == ([block.number], [(KEPT + 1, 0)])

"""Schedulers, slots, queue and kept prefixes against a model, in any order of events.

`SCHEDULER_EXAMPLES=5000` tries more than the 60 orders of `make test`.
"""

import os
import threading

from hypothesis import Phase, settings

from dflash_trt.decoding import WaitingQueue
from dflash_trt.decoding.prefix_cache import BLOCK, PrefixCache
from dflash_trt.engines import FIRST_BLOCK
from tests.support.scheduler_model import WORDS, SchedulerModel

EXAMPLES = os.environ.get("SCHEDULER_EXAMPLES", "")

SchedulerModel.TestCase.settings = settings(
    max_examples=int(EXAMPLES or 60),
    stateful_step_count=40,
    deadline=None,
    derandomize=not EXAMPLES,
    phases=[Phase.generate] if EXAMPLES else [*Phase],
)
TestScheduler = SchedulerModel.TestCase


def test_each_item_is_taken_once_by_many_threads() -> None:
    queue, taken, lock = WaitingQueue[int](), list[int](), threading.Lock()
    for number in range(2000):
        queue.add(number, number % 3)

    def take() -> None:
        while (item := queue.take()) is not None:
            with lock:
                taken.append(item)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == list(range(2000))


def test_the_least_recently_used_goes_and_never_before_what_follows_it() -> None:
    cache = PrefixCache(4)
    old, new = WORDS[0] + WORDS[1], WORDS[2] + WORDS[1]
    for text in (old, new):
        cache.insert("", text, len(text))
    assert len(cache.find("", [*old, 9], for_drafts=True)) == 2  # used again
    cache.insert("", WORDS[1], BLOCK)
    assert [len(cache.find("", [*text, 9], for_drafts=True)) for text in (old, new)] == [2, 1]


def test_a_cache_smaller_than_a_block_stays_empty() -> None:
    """1 MiB is too small for a block of a large model."""
    cache = PrefixCache(0)
    assert cache.insert("", WORDS[0], BLOCK) == ([], [])
    assert cache.find("", [*WORDS[0], 9], for_drafts=True) == []


def test_a_text_never_evicts_its_own_blocks() -> None:
    cache, text = PrefixCache(1), WORDS[0] + WORDS[1]
    assert cache.insert("", text, 2 * BLOCK) == ([], [(FIRST_BLOCK, 0)])
    assert cache.insert("", text, 2 * BLOCK) == ([], [])
    assert cache.insert("", WORDS[1], BLOCK) == ([FIRST_BLOCK], [(FIRST_BLOCK + 1, 0)])


def test_nothing_is_found_of_what_was_kept_before_a_step_that_failed() -> None:
    """The engines' state is unknown, so all blocks are dropped."""
    cache, text = PrefixCache(1), [*WORDS[0], 9]
    cache.insert("", text, BLOCK)
    cache.confirm_drops()
    cache.insert("", WORDS[1], BLOCK)  # the step has to drop the first one
    cache.clear()
    assert not len(cache)
    assert not cache.find("", text, for_drafts=True)
    assert cache.insert("", [], 0) == ([FIRST_BLOCK, FIRST_BLOCK + 1], [])
    cache.confirm_drops()
    cache.clear()
    assert cache.insert("", [], 0) == ([], [])

"""The waiting queue: by priority, then first come, first served."""

from __future__ import annotations

import threading

from dflash_trt.decoding import WaitingQueue


def test_by_priority_then_arrival() -> None:
    queue = WaitingQueue[str]()
    for item, priority in (("a", 1), ("b", 0), ("c", 1), ("d", -1), ("e", 0)):
        queue.add(item, priority)
    assert len(queue) == 5
    assert [queue.take() for _ in range(6)] == ["d", "b", "e", "a", "c", None]


def test_what_is_removed_does_not_come() -> None:
    queue = WaitingQueue[object]()
    items = [object() for _ in range(6)]
    for item in items:
        queue.add(item)
    assert queue.remove(items[2])
    assert not queue.remove(items[2])
    assert not queue.remove(object())
    assert [queue.take() for _ in range(5)] == [*items[:2], *items[3:]]


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

"""Sequences that wait for a slot."""

import heapq
import threading
from typing import Generic, TypeVar

T = TypeVar("T")


class WaitingQueue(Generic[T]):
    """Queue by priority, then arrival. Thread-safe."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, T]] = []  # priority, arrival, item
        self._arrivals = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, item: T, priority: int = 0) -> None:
        """Add an item; a lower priority number is served first."""
        with self._lock:
            heapq.heappush(self._heap, (priority, self._arrivals, item))
            self._arrivals += 1

    def take(self) -> T | None:
        with self._lock:
            if not self._heap:
                return None
            _, _, item = heapq.heappop(self._heap)
            return item

    def remove(self, item: T) -> bool:
        with self._lock:
            remaining = [entry for entry in self._heap if entry[2] is not item]
            if len(remaining) == len(self._heap):
                return False
            heapq.heapify(remaining)
            self._heap = remaining
            return True

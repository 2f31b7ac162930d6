"""What waits, and what is next."""

import heapq
import threading
from typing import Generic, TypeVar

T = TypeVar("T")


class WaitingQueue(Generic[T]):
    """By priority, then first come, first served. Any number of threads may share it."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, T]] = []  # priority, arrival, item
        self._arrivals = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, item: T, priority: int = 0) -> None:
        """priority: lower goes first."""
        with self._lock:
            heapq.heappush(self._heap, (priority, self._arrivals, item))
            self._arrivals += 1

    def take(self) -> T | None:
        """Return the next one, or None when nothing waits."""
        with self._lock:
            return heapq.heappop(self._heap)[2] if self._heap else None

    def remove(self, item: T) -> bool:
        """Return whether it was waiting; it no longer is."""
        with self._lock:
            kept = [entry for entry in self._heap if entry[2] is not item]
            removed = len(kept) < len(self._heap)
            if removed:
                heapq.heapify(kept)
                self._heap = kept
            return removed

"""What waits, and whose turn is next."""

import heapq
import threading
from typing import Generic, TypeVar

T = TypeVar("T")


class WaitingQueue(Generic[T]):
    """Clients take turns; what is one client's goes by priority, then first come, first served.

    Any number of threads may share it.
    """

    def __init__(self) -> None:
        # by client, the next one's first: (priority, arrival, item)
        self._heaps: dict[str, list[tuple[int, int, T]]] = {}
        self._arrivals = 0
        self._size = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._size

    def add(self, item: T, client: str, priority: int = 0) -> None:
        """priority: lower goes first."""
        with self._lock:
            heapq.heappush(self._heaps.setdefault(client, []), (priority, self._arrivals, item))
            self._arrivals += 1
            self._size += 1

    def take(self) -> T | None:
        """The next one, or None when nothing waits."""
        with self._lock:
            if not self._size:
                return None
            client = next(iter(self._heaps))
            heap = self._heaps.pop(client)
            item = heapq.heappop(heap)[2]
            if heap:
                self._heaps[client] = heap  # after all others
            self._size -= 1
            return item

    def remove(self, item: T, client: str) -> bool:
        """Whether it was waiting; it no longer is."""
        with self._lock:
            heap = self._heaps.get(client, [])
            kept = [entry for entry in heap if entry[2] is not item]
            if len(kept) == len(heap):
                return False
            heapq.heapify(kept)
            self._heaps[client] = kept
            if not kept:
                del self._heaps[client]
            self._size -= 1
            return True

    def newest(self, client: str) -> list[T]:
        """What a client waits for, the latest arrival first."""
        with self._lock:
            entries = sorted(self._heaps.get(client, []), key=lambda entry: -entry[1])
        return [item for _, _, item in entries]

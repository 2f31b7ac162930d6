"""Where sequences wait for a row."""

import heapq
import threading

from dflash_trt.decoding.sequence import Sequence


class Line:
    """By priority, then first come, first served; two schedulers' threads may share it."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Sequence]] = []
        self._arrivals = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._heap)

    def put(self, sequence: Sequence) -> None:
        with self._lock:
            heapq.heappush(self._heap, (sequence.request.priority, self._arrivals, sequence))
            self._arrivals += 1

    def take(self) -> Sequence | None:
        """The next one, or None when nobody waits."""
        with self._lock:
            return heapq.heappop(self._heap)[2] if self._heap else None

    def remove(self, sequence: Sequence) -> bool:
        """Whether it was waiting; it no longer is."""
        with self._lock:
            kept = [entry for entry in self._heap if entry[2] is not sequence]
            found = len(kept) < len(self._heap)
            self._heap = kept
            heapq.heapify(self._heap)
            return found

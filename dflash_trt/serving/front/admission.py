"""Admission: how many sequences may run and wait, in all and of one client."""

from collections import Counter


class Admission:
    """Counts admitted sequences by client. Not thread-safe."""

    def __init__(self, limit: int, client_limit: int | None) -> None:
        self.limit = limit
        self.client_limit = limit if client_limit is None else min(limit, client_limit)
        self._admitted: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return self._admitted.total()

    def excess(self, count: int) -> int:
        """By how many sequences the limit would be exceeded with `count` more."""
        return max(0, self.total + count - self.limit)

    def over_client_limit(self, client: str, count: int) -> bool:
        return self._admitted[client] + count > self.client_limit

    def admit(self, client: str, count: int) -> None:
        self._admitted[client] += count

    def release(self, client: str, count: int) -> None:
        self._admitted[client] -= count
        if not self._admitted[client]:
            del self._admitted[client]

    def victim(self, client: str, count: int) -> str | None:
        """Whose waiting requests to evict for `count` more of `client`: who has most admitted.

        None if that one would then have fewer than `client`.
        """
        if not self._admitted:
            return None
        most = max(self._admitted, key=lambda each: self._admitted[each])
        left = self._admitted[most] - self.excess(count)
        return most if left >= self._admitted[client] + count else None

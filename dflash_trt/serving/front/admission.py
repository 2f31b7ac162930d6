"""Admission for sequences, running and waiting, and which clients hold them."""

from collections import Counter


class Admission:
    """So many in all, and of one client, where there is such a limit. Not for several threads."""

    def __init__(self, most: int, most_each: int | None) -> None:
        self.most = most
        self.most_each = most if most_each is None else min(most, most_each)
        self._held: Counter[str] = Counter()

    @property
    def held(self) -> int:
        return self._held.total()

    def missing(self, count: int) -> int:
        """How many of so many places are not free."""
        return max(0, self.held + count - self.most)

    def too_many(self, client: str, count: int) -> bool:
        """Whether so many more would be above the limit of one client."""
        return self._held[client] + count > self.most_each

    def take(self, client: str, count: int) -> None:
        self._held[client] += count

    def give_back(self, client: str, count: int) -> None:
        self._held[client] -= count
        if not self._held[client]:
            del self._held[client]

    def gives_way(self, client: str, count: int) -> str | None:
        """Who is to give up the places that a client misses: the one that holds most.

        None: nobody, since it would then hold fewer than the client that comes.
        """
        if not self._held:
            return None
        most = max(self._held, key=lambda each: self._held[each])
        left = self._held[most] - self.missing(count)
        return most if left >= self._held[client] + count else None

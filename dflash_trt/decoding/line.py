"""Where sequences wait for a row."""

from dflash_trt.decoding.sequence import Sequence
from dflash_trt.decoding.turns import Turns


class Line:
    """In turns of their clients; two schedulers' threads may share it."""

    def __init__(self) -> None:
        self._turns: Turns[Sequence] = Turns()

    def __len__(self) -> int:
        return len(self._turns)

    def put(self, sequence: Sequence) -> None:
        self._turns.add(sequence, sequence.request.client, sequence.request.priority)

    def take(self) -> Sequence | None:
        """The next one, or None when nobody waits."""
        return self._turns.take()

    def remove(self, sequence: Sequence) -> bool:
        """Whether it was waiting; it no longer is."""
        return self._turns.remove(sequence, sequence.request.client)

    def newest(self, client: str) -> list[Sequence]:
        """Those of a client that wait, the latest first."""
        return self._turns.newest(client)

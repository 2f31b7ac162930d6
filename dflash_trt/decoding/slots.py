"""Which sequence has which slot: active ones stay dense, so that a step pays for what is active."""

from collections.abc import Iterator

from dflash_trt.decoding.messages import FREED
from dflash_trt.decoding.sequence import Sequence


class Slots:
    """Decoding sequences have the slots `first` .. first+n-1, the one being prefilled the next."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.decoding: list[Sequence] = []
        self.prefilling: Sequence | None = None
        self._copies: list[tuple[int, int, Sequence]] = []  # from, to, whose
        self._used = 0  # in the last step

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.decoding
        if self.prefilling is not None:
            yield self.prefilling

    def __len__(self) -> int:
        return len(self.decoding) + (self.prefilling is not None)

    def free(self, sequence: Sequence) -> None:
        """The last decoding sequence moves into the slot, the prefilling one moves up."""
        if sequence is self.prefilling:
            self.prefilling = None
            return
        index, last = self.decoding.index(sequence), len(self.decoding) - 1
        moved = self.decoding.pop()
        if index != last:
            self.decoding[index] = moved
            self._copies.append((last, index, moved))
        if self.prefilling is not None and self.prefilling.position:
            self._copies.append((last + 1, last, self.prefilling))

    def take_copies(self) -> list[int]:
        """What the next step has to copy first, as in `VerifyInput.batch`; asked once a step."""
        copies: list[int] = []
        for source, destination, moved in self._copies:
            copies += [self.first + source, self.first + destination, moved.position]
        for left in range(len(self), self._used):
            copies += [self.first + left, FREED, 0]
        self._copies, self._used = [], len(self)
        return copies

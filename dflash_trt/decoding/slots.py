"""Which sequence has which slot: active ones stay dense, so that a step pays for what is active."""

from collections.abc import Iterator

from dflash_trt.decoding.messages import FREED
from dflash_trt.decoding.prefix_cache import BLOCK, PrefixCache
from dflash_trt.decoding.sequence import Sequence


class Slots:
    """Decoding sequences have the slots `first` .. first+n-1, the one being prefilled the next."""

    def __init__(self, first: int, cache: PrefixCache | None = None) -> None:
        """cache: where prefixes of these sequences are kept, for those to come."""
        self.first = first
        self.decoding: list[Sequence] = []
        self.prefilling: Sequence | None = None
        self._cache = cache
        self._copies: list[tuple[int, int, int | Sequence, int]] = []  # tokens, or all of whose
        self._used = 0  # in the last step

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.decoding
        if self.prefilling is not None:
            yield self.prefilling

    def __len__(self) -> int:
        return len(self.decoding) + (self.prefilling is not None)

    @property
    def keeps(self) -> bool:
        """Whether prompts are kept."""
        return self._cache is not None

    @property
    def unsaved(self) -> bool:
        """Whether what is to be kept waits for a step, and no sequence is left that has one."""
        return self._cache is not None and bool(self._copies) and not len(self)

    def load(self, sequence: Sequence, *, drafted: bool) -> None:
        """Begin the one being prefilled with what is kept of its prompt.

        drafted: only with what the drafter has seen.
        """
        request = sequence.request
        if self._cache is None or request.sampling.prompt_logprobs:
            return
        found = self._cache.find(self, request.cache_salt, request.prompt, drafted=drafted)
        slot = self.first + len(self.decoding)
        self._copies += [(each.number, slot, BLOCK, i * BLOCK) for i, each in enumerate(found)]
        seen = next((i for i, each in enumerate(found) if not each.drafted), len(found))
        sequence.load(len(found) * BLOCK, seen * BLOCK)

    def keep(self, sequence: Sequence) -> None:
        """Keep what is in the caches of it; while it goes on only what both models have."""
        if self._cache is None:
            return
        request, tokens = sequence.request, [*sequence.request.prompt, *sequence.tokens]
        both = sequence.finish_reason is None and not sequence.out_of_sync
        tokens = tokens[: sequence.seen if both else sequence.position]
        dropped, stored = self._cache.keep(self, request.cache_salt, tokens, sequence.seen)
        slot = self.first + [*self].index(sequence)
        self._copies += [(number, FREED, 0, 0) for number in dropped]
        self._copies += [(slot, number, BLOCK, start) for number, start in stored]

    def free(self, sequence: Sequence) -> None:
        """The last decoding sequence moves into the slot, the prefilling one moves up."""
        if sequence.finish_reason != "error":
            self.keep(sequence)
        if sequence is self.prefilling:
            self.prefilling = None
            return
        index, last = self.decoding.index(sequence), len(self.decoding) - 1
        moved = self.decoding.pop()
        if index != last:
            self.decoding[index] = moved
            self._move(last, index, moved)
        if self.prefilling is not None and self.prefilling.position:
            self._move(last + 1, last, self.prefilling)

    def take_copies(self) -> list[int]:
        """What the next step has to copy first, as in `VerifyInput.batch`; asked once a step."""
        copies: list[int] = []
        for source, destination, tokens, start in self._copies:
            count = tokens.position if isinstance(tokens, Sequence) else tokens
            copies += [source, destination, count, start]
        for left in range(len(self), self._used):
            copies += [self.first + left, FREED, 0, 0]
        self._copies, self._used = [], len(self)
        return copies

    def done(self) -> None:
        """The step that had the copies has ended well."""
        if self._cache is not None:
            self._cache.done(self)

    def forget(self) -> None:
        """The step failed, and nobody knows what it did."""
        if self._cache is not None:
            self._cache.clear(self)

    def _move(self, source: int, destination: int, whose: Sequence) -> None:
        self._copies.append((self.first + source, self.first + destination, whose, 0))

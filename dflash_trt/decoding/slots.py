"""Slot assignment: active sequences stay dense, so that a step costs only what is active."""

from collections.abc import Iterator
from dataclasses import dataclass

from dflash_trt.decoding.messages import Copy
from dflash_trt.decoding.prefix_cache import BLOCK, Block, PrefixCache
from dflash_trt.decoding.sequence import SequenceState
from dflash_trt.decoding.state_cache import State, StateCache


@dataclass(slots=True)
class _Move:
    """A copy of a whole sequence, as long as it is when the copy is taken."""

    source: int
    destination: int
    sequence: SequenceState

    def copy(self) -> Copy:
        return Copy(self.source, self.destination, self.sequence.position, start=0)


class Slots:
    """Decoding sequences have slots `first` .. first+n-1, the one in prefill the next.

    The methods queue copies; `take_copies` hands them to the next step, which does them first.
    """

    def __init__(self, first: int, cache: PrefixCache | None = None) -> None:
        self.first = first
        self.decoding: list[SequenceState] = []
        self.prefilling: SequenceState | None = None
        self.cache = cache
        self._copies: list[Copy | _Move] = []
        self._used = 0  # slots used in the last step

    def __iter__(self) -> Iterator[SequenceState]:
        yield from self.decoding
        if self.prefilling is not None:
            yield self.prefilling

    def __len__(self) -> int:
        return len(self.decoding) + (self.prefilling is not None)

    def load(self, sequence: SequenceState, *, for_drafts: bool) -> None:
        """Load the cached prefix of a prompt; for_drafts: only what the drafter has, too."""
        request = sequence.request
        cache = self.cache
        if cache is None:
            return
        blocks = list[Block]()
        if not request.sampling.prompt_logprobs:
            blocks = cache.find(request.cache_salt, request.prompt, for_drafts=for_drafts)
        slot = self.first + len(self.decoding)
        loaded = 0
        for block in blocks:
            self._copies.append(Copy(block.number, slot, len(block.tokens), loaded))
            loaded += len(block.tokens)
        if not isinstance(cache, StateCache):
            sequence.load(loaded, BLOCK * _count_serving_drafts(blocks))
            return
        state = blocks[-1] if blocks else None
        if isinstance(state, State):
            sequence.load(loaded, loaded if state.serves_drafts else 0, state.buffered or 0)
        sequence.chunk_ends = cache.chunk_ends(request.cache_salt, request.prompt, loaded)

    def store_prefix(self, sequence: SequenceState) -> None:
        """Add a sequence to the prefix cache; while it runs in sync, only what both models have."""
        cache = self.cache
        if cache is None:
            return
        salt = sequence.request.cache_salt
        tokens = [*sequence.request.prompt, *sequence.tokens]
        if isinstance(cache, StateCache):
            tokens = tokens[: sequence.position - sequence.replayed]
            in_sync = not sequence.out_of_sync
            dropped, stored = cache.insert_state(salt, tokens, sequence.seen, in_sync=in_sync)
        else:
            goes_on = sequence.finish_reason is None
            drafted_only = goes_on and not sequence.out_of_sync
            tokens = tokens[: sequence.seen if drafted_only else sequence.position]
            dropped, stored = cache.insert(salt, tokens, sequence.seen)
        slot = self.first + [*self].index(sequence)
        for number in dropped:
            self._copies.append(Copy(number, None, tokens=0, start=0))
        for number, start in stored:
            self._copies.append(Copy(slot, number, min(BLOCK, len(tokens) - start), start))

    def store_prompt(self, sequence: SequenceState) -> None:
        """Add a prompt that is in, or of a hybrid the state at a chunk's end before its own."""
        if isinstance(self.cache, StateCache) and sequence.position not in sequence.chunk_ends:
            return
        self.store_prefix(sequence)

    def free(self, sequence: SequenceState) -> None:
        """Free a slot: the last decoding sequence moves into it, the one in prefill moves down."""
        if sequence.finish_reason != "error":
            self.store_prefix(sequence)
        if sequence is self.prefilling:
            self.prefilling = None
            return
        index = self.decoding.index(sequence)
        last = len(self.decoding) - 1
        moved = self.decoding.pop()
        if index != last:
            self.decoding[index] = moved
            self._move(last, index, moved)
        if self.prefilling is not None and self.prefilling.position:
            self._move(last + 1, last, self.prefilling)

    def take_copies(self) -> list[Copy]:
        """Return the copies for the next step; call once per step."""
        copies = [copy.copy() if isinstance(copy, _Move) else copy for copy in self._copies]
        for index in range(len(self), self._used):
            copies.append(Copy(self.first + index, None, tokens=0, start=0))
        self._copies = []
        self._used = len(self)
        return copies

    def confirm_copies(self) -> None:
        if self.cache is not None:
            self.cache.confirm_drops()

    def forget(self) -> None:
        if self.cache is not None:
            self.cache.clear()

    def _move(self, source: int, destination: int, sequence: SequenceState) -> None:
        self._copies.append(_Move(self.first + source, self.first + destination, sequence))


def _count_serving_drafts(blocks: list[Block]) -> int:
    """Return how many blocks the drafter has too, from the first on."""
    for index, block in enumerate(blocks):
        if not block.serves_drafts:
            return index
    return len(blocks)

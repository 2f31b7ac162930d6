"""Slot assignment: active sequences stay dense, so that a step costs only what is active."""

from collections.abc import Iterator

from dflash_trt.decoding.messages import FREED
from dflash_trt.decoding.prefix_cache import BLOCK, Block, PrefixCache
from dflash_trt.decoding.sequence import SequenceState
from dflash_trt.decoding.state_cache import State, StateCache


class Slots:
    """Decoding sequences have slots `first` .. first+n-1, the one in prefill the next.

    The methods queue copies; `take_copies` hands them to the next step, which does them first.
    """

    def __init__(self, first: int, cache: PrefixCache | None = None) -> None:
        self.first = first
        self.decoding: list[SequenceState] = []
        self.prefilling: SequenceState | None = None
        self.cache = cache
        # see `take_copies`; a sequence in place of a number of tokens: all of it
        self._copies: list[tuple[int, int, int | SequenceState, int]] = []
        self._used = 0  # slots used in the last step

    def __iter__(self) -> Iterator[SequenceState]:
        yield from self.decoding
        if self.prefilling is not None:
            yield self.prefilling

    def __len__(self) -> int:
        return len(self.decoding) + (self.prefilling is not None)

    def load(self, sequence: SequenceState, *, drafted: bool) -> None:
        """Load a cached prefix for the one in prefill; drafted: only what the drafter has too."""
        request, cache = sequence.request, self.cache
        if cache is None:
            return
        found = list[Block]()
        if not request.sampling.prompt_logprobs:
            found = cache.find(request.cache_salt, request.prompt, drafted=drafted)
        slot, loaded = self.first + len(self.decoding), 0
        for block in found:
            self._copies.append((block.number, slot, len(block.tokens), loaded))
            loaded += len(block.tokens)
        if not isinstance(cache, StateCache):
            seen = next((i for i, block in enumerate(found) if not block.drafted), len(found))
            sequence.load(loaded, seen * BLOCK)
            return
        state = found[-1] if found else None
        if isinstance(state, State):
            sequence.load(loaded, loaded if state.drafted else 0, state.waiting or 0)
        sequence.stops = cache.stops(request.cache_salt, request.prompt, loaded)

    def store_prefix(self, sequence: SequenceState) -> None:
        """Add a sequence to the prefix cache; while it runs in sync, only what both models have."""
        if self.cache is None:
            return
        request, tokens = sequence.request, [*sequence.request.prompt, *sequence.tokens]
        if isinstance(self.cache, StateCache):
            tokens = tokens[: sequence.position - sequence.replayed]
            dropped, stored = self.cache.insert_state(
                request.cache_salt, tokens, sequence.seen, drafted=not sequence.out_of_sync
            )
        else:
            both = sequence.finish_reason is None and not sequence.out_of_sync
            tokens = tokens[: sequence.seen if both else sequence.position]
            dropped, stored = self.cache.insert(request.cache_salt, tokens, sequence.seen)
        slot = self.first + [*self].index(sequence)
        self._copies += [(number, FREED, 0, 0) for number in dropped]
        for number, start in stored:
            self._copies.append((slot, number, min(BLOCK, len(tokens) - start), start))

    def store_prompt(self, sequence: SequenceState) -> None:
        """Add a prompt that is in, or of a hybrid the state at a stop before its end."""
        if isinstance(self.cache, StateCache) and sequence.position not in sequence.stops:
            return
        self.store_prefix(sequence)

    def free(self, sequence: SequenceState) -> None:
        """Free a slot: the last decoding sequence moves into it, the one in prefill moves down."""
        if sequence.finish_reason != "error":
            self.store_prefix(sequence)
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
        """Return the copies for the next step, as in `VerifyInput.batch`; call once per step."""
        copies: list[int] = []
        for source, destination, tokens, start in self._copies:
            count = tokens.position if isinstance(tokens, SequenceState) else tokens
            copies += [source, destination, count, start]
        for left in range(len(self), self._used):
            copies += [self.first + left, FREED, 0, 0]
        self._copies, self._used = [], len(self)
        return copies

    def confirm_copies(self) -> None:
        if self.cache is not None:
            self.cache.confirm_drops()

    def forget(self) -> None:
        if self.cache is not None:
            self.cache.clear()

    def _move(self, source: int, destination: int, whose: SequenceState) -> None:
        self._copies.append((self.first + source, self.first + destination, whose, 0))

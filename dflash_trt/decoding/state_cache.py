"""Kept prefixes of a hybrid: a state belongs to one position, so it is never cut inside.

A text's KV entries are in blocks that texts share, as in `PrefixCache`. A state comes after a
block's end or up to `BLOCK - 1` tokens later; it holds the KV entries of these tokens too. It is
found by the block before it and the exact tokens after that.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dflash_trt.decoding.prefix_cache import BLOCK, Block, PrefixCache, block_bytes
from dflash_trt.engines import FIRST_STATE, EngineInfo

# these last tokens of a prompt often differ in the next turn, where templates open the answer, with
# a thought or without one; so no state is kept after them
OPENING = 16


@dataclass(slots=True, eq=False)
class State(Block):
    """A hybrid's state after some text, and the KV entries of less than a block before it."""

    buffered: int | None  # tokens whose features are kept too; None: the drafter cannot go on
    blocks: int  # as much memory

    @property
    def serves_drafts(self) -> bool:
        return self.buffered is not None

    @property
    def size(self) -> int:
        return self.blocks


class StateCache(PrefixCache):
    """The prefix cache of a hybrid; a state goes before the blocks that lead to it."""

    def __init__(self, blocks: int, state_blocks: int, features_per_block: int = 0) -> None:
        """Set sizes in blocks: the limit, a state's, and features that take as much as one."""
        super().__init__(blocks)
        self._state_blocks = state_blocks
        self._features_per_block = features_per_block
        self._state_numbers = FIRST_STATE  # the next state's

    def find(self, salt: str, tokens: Sequence[int], *, for_drafts: bool) -> list[Block]:
        """Return blocks and the state after them, of the longest text that a prompt begins with.

        Never all of the prompt. for_drafts: only a state that the drafter can go on from.
        """
        path = super().find(salt, tokens, for_drafts=False)
        for depth in range(len(path), -1, -1):
            state = self._longest_state(salt, tokens, path[:depth], for_drafts)
            if state is not None:
                result = [*path[:depth], state]
                self._touch(result)
                return result
        return []

    def _longest_state(
        self, salt: str, tokens: Sequence[int], path: Sequence[Block], for_drafts: bool
    ) -> Block | None:
        """Return the state that comes right after a path and the most of the next tokens."""
        before = path[-1].number if path else salt
        rest = tuple(tokens[len(path) * BLOCK : len(tokens) - 1][: BLOCK - 1])
        for length in range(len(rest), -1, -1):
            state = self._blocks.get((before, rest[:length]))
            if state is not None and (state.serves_drafts or not for_drafts):
                return state
        return None

    def chunk_ends(self, salt: str, tokens: Sequence[int], start: int) -> list[int]:
        """Return at which positions after `start` a prompt's state is worth keeping.

        One is before the opening of the answer, from where the next turn of a chat goes on. The
        other is where the prompt leaves a text that is known, but has no state there: a beginning
        that texts share.
        """
        last = len(tokens) - OPENING
        branch = BLOCK * len(super().find(salt, tokens, for_drafts=False))
        return sorted({position for position in (branch, last) if start < position <= last})

    def insert_state(
        self, salt: str, tokens: Sequence[int], seen: int, *, in_sync: bool
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Insert the state after a text, and its blocks; see `insert`.

        seen: tokens in the drafter's cache; if `in_sync` it can go on, because features of the
        others wait.
        """
        buffered = max(len(tokens) - seen, 0) if in_sync else None
        size = self._state_blocks + self._blocks_of_features(buffered or 0)
        fits = size + len(tokens) // BLOCK <= self._limit
        if not tokens or not fits:
            return self._take_dropped(), []
        path, stored = self._insert_blocks(salt, tokens, seen)
        start = len(path) * BLOCK
        if len(tokens) - start < BLOCK:
            before = path[-1].number if path else salt
            key = (before, tuple(tokens[start:]))
            state = self._blocks.get(key)
            if state is not None and in_sync and not state.serves_drafts:
                self._drop(state)
                state = None
            if state is None and self._make_room(path, size):
                state = self._add(State(key, self._state_numbers, 0, buffered, size))
                self._state_numbers += 1
                stored.append((state.number, start))
            if state is not None:
                path.append(state)
        self._touch(path)
        return self._take_dropped(), stored

    def _blocks_of_features(self, count: int) -> int:
        if not self._features_per_block:
            return 0
        return -(-count // self._features_per_block)


def open_prefix_cache(limit: int, engines: Iterable[EngineInfo]) -> PrefixCache:
    """Return the prefix cache of a target and its drafter; limit: its bytes."""
    infos = [*engines]
    target = infos[0]
    block = block_bytes(infos)
    if target.states is None:
        return PrefixCache(limit // block)
    state_blocks = -(-target.states.kept_bytes // block) + 1
    features_per_block = block // max(4 * target.feature_size, 1)
    return StateCache(limit // block, state_blocks, max(features_per_block, 1))

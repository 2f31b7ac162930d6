"""Bookkeeping of cached prefixes, which both engines keep outside their slots.

Prefixes are kept in blocks of `BLOCK` tokens. A block is keyed by the block before it and its own
tokens (exact tokens where vLLM uses hashes), so that texts with a common prefix share blocks. The
engines do the copies that `VerifyInput.batch` lists.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from dflash_trt.engines import FIRST_BLOCK, EngineInfo

BLOCK = 16  # tokens; a partial last block is prefilled again
Key = tuple[str | int, tuple[int, ...]]  # cache salt or number of the previous block; tokens


@dataclass(slots=True, eq=False)
class Block:
    """KV rows of `BLOCK` tokens, under the same number in both engines."""

    key: Key
    number: int
    drafted: bool  # whether the drafter has its rows too


class PrefixCache:
    """Prefix cache of one scheduler at a time, whose steps copy blocks in the order of the calls.

    The least recently used block is evicted first, and never before the blocks that follow it.
    """

    def __init__(self, blocks: int) -> None:
        self._most = blocks
        self._blocks: OrderedDict[Key, Block] = OrderedDict()  # least recently used first
        self._numbers = FIRST_BLOCK  # the next block's
        self._dropped: list[int] = []  # to be dropped by the engines
        self._dropping: list[int] = []  # by the next step, if it does not fail
        self._paused = False

    def __len__(self) -> int:
        return len(self._blocks)

    def find(self, salt: str, tokens: Sequence[int], *, drafted: bool) -> list[Block]:
        """Return a prompt's cached blocks, never of its last token; drafted: the drafter's too."""
        found = list[Block]()
        for key in _keys(salt, tokens[:-1], found):
            block = self._blocks.get(key)
            if block is None or (drafted and not block.drafted):
                break
            found.append(block)
        self._touch(found)
        return found

    def insert(
        self, salt: str, tokens: Sequence[int], drafted: int
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Insert a sequence's blocks; the drafter's cache holds the first `drafted` tokens.

        Returns what the next step must do: block numbers to drop; (number, first token) of each
        block to store.
        """
        path, stored = list[Block](), list[tuple[int, int]]()
        for key in _keys(salt, tokens, path):
            start = BLOCK * len(path)
            seen = start + BLOCK <= drafted
            block = self._blocks.get(key)
            if block is None:
                if self._paused or not self._make_room(path):
                    break
                block = self._blocks[key] = Block(key, self._numbers, seen)
                self._numbers += 1
                stored.append((block.number, start))
            elif seen and not block.drafted:
                block.drafted = True
                stored.append((block.number, start))
            self._blocks.move_to_end(key)
            path.append(block)
        self._touch(path)
        dropped, self._dropped = self._dropped, []
        self._dropping += dropped
        return dropped, stored

    def confirm_drops(self) -> None:
        self._dropping = []

    def clear(self) -> None:
        """Drop all blocks after a failed step, because the engines' state is unknown."""
        self._dropped += self._dropping
        self._dropping = []
        self._drop_all()

    def pause(self, paused: bool) -> None:
        """Clear the cache; while paused is true, add nothing."""
        self._paused = paused
        self._drop_all()

    def _drop_all(self) -> None:
        blocks, self._blocks = self._blocks, OrderedDict()
        self._dropped += [block.number for block in blocks.values()]

    def _touch(self, path: Sequence[Block]) -> None:
        """Mark blocks as recently used, the first one last, so that it is evicted last."""
        for block in reversed(path):
            self._blocks.move_to_end(block.key)

    def _make_room(self, path: Sequence[Block]) -> bool:
        """Evict a block if the cache is full, but none of `path`; return whether there is room."""
        if len(self._blocks) < self._most:
            return True
        oldest = next(iter(self._blocks.values()), None)
        if oldest is None or (path and oldest is path[0]):  # of `path` the first is the oldest
            return False
        del self._blocks[oldest.key]
        self._dropped.append(oldest.number)
        return True


def _keys(salt: str, tokens: Sequence[int], path: Sequence[Block]) -> Iterator[Key]:
    """Yield the key of each block; the caller appends the block to `path` in between."""
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        yield path[-1].number if path else salt, tuple(tokens[start : start + BLOCK])


def block_bytes(engines: Iterable[EngineInfo]) -> int:
    return BLOCK * sum(info.token_bytes for info in engines)

"""Bookkeeping of cached prefixes, which both engines keep outside their slots.

Prefixes are kept in blocks of `BLOCK` tokens. A block is keyed by the block before it and its own
tokens (exact tokens where vLLM uses hashes), so that texts with a common prefix share blocks. The
engines do the copies that `Round.copies` lists.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dflash_trt.engines import FIRST_BLOCK, EngineInfo

BLOCK = 16  # tokens; a partial last block is prefilled again
Key = tuple[str | int, tuple[int, ...]]  # cache salt or number of the previous block; tokens
AnyBlock = TypeVar("AnyBlock", bound="Block")


@dataclass(slots=True, eq=False)
class Block:
    """KV entries of `BLOCK` tokens, under the same number in both engines."""

    key: Key
    number: int
    seen: int  # of its tokens, how many the drafter has the rows of

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.key[1]

    @property
    def serves_drafts(self) -> bool:
        return self.seen == len(self.tokens)

    @property
    def size(self) -> int:
        """Return the memory that it takes, in blocks."""
        return 1


class PrefixCache:
    """Prefix cache of one scheduler at a time, whose steps copy blocks in the order of the calls.

    The least recently used block is evicted first, and never before the blocks that follow it.
    """

    def __init__(self, blocks: int) -> None:
        self._limit = blocks
        self.used = 0  # blocks, or as much memory
        self._blocks: OrderedDict[Key, Block] = OrderedDict()  # least recently used first
        self._numbers = FIRST_BLOCK  # the next block's
        self._dropped: list[int] = []  # to be dropped by the engines
        self._dropping: list[int] = []  # by the next step, if it does not fail

    def __len__(self) -> int:
        return len(self._blocks)

    def find(self, salt: str, tokens: Sequence[int], *, for_drafts: bool) -> list[Block]:
        """Return a prompt's cached blocks, never of its last token.

        for_drafts: only blocks that the drafter has, too.
        """
        path = list[Block]()
        for key in _keys(salt, tokens[:-1], path):
            block = self._blocks.get(key)
            if block is None:
                break
            if for_drafts and not block.serves_drafts:
                break
            path.append(block)
        self._touch(path)
        return path

    def insert(
        self, salt: str, tokens: Sequence[int], seen: int
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Insert a sequence's blocks; the drafter's cache holds the first `seen` tokens.

        Returns what the next step must do: block numbers to drop; (number, first token) of each
        block to store.
        """
        path, stored = self._insert_blocks(salt, tokens, seen // BLOCK * BLOCK)
        self._touch(path)
        return self._take_dropped(), stored

    def _insert_blocks(
        self, salt: str, tokens: Sequence[int], seen: int
    ) -> tuple[list[Block], list[tuple[int, int]]]:
        """Return the blocks of a text as far as there is room, and which are to be stored."""
        path = list[Block]()
        stored = list[tuple[int, int]]()
        for key in _keys(salt, tokens, path):
            start = BLOCK * len(path)
            rows = min(max(seen - start, 0), BLOCK)
            block = self._blocks.get(key)
            if block is None:
                if not self._make_room(path):
                    break
                block = self._add(Block(key, self._numbers, rows))
                self._numbers += 1
                stored.append((block.number, start))
            elif rows > block.seen:
                block.seen = rows
                stored.append((block.number, start))
            self._blocks.move_to_end(key)
            path.append(block)
        return path, stored

    def confirm_drops(self) -> None:
        self._dropping = []

    def clear(self) -> None:
        """Drop all blocks: the engines' state is unknown, or the drafter has not seen them."""
        self._dropped += self._dropping
        self._dropping = []
        for block in [*self._blocks.values()]:
            self._drop(block)

    def _add(self, block: AnyBlock) -> AnyBlock:
        self._blocks[block.key] = block
        self.used += block.size
        return block

    def _drop(self, block: Block) -> None:
        del self._blocks[block.key]
        self.used -= block.size
        self._dropped.append(block.number)

    def _take_dropped(self) -> list[int]:
        dropped = self._dropped
        self._dropped = []
        self._dropping += dropped
        return dropped

    def _touch(self, path: Sequence[Block]) -> None:
        """Mark blocks as recently used, the first one last, so that it is evicted last."""
        for block in reversed(path):
            self._blocks.move_to_end(block.key)

    def _make_room(self, path: Sequence[Block], size: int = 1) -> bool:
        """Evict blocks until `size` more fit, but none of `path`; return whether they do."""
        while self.used + size > self._limit:
            oldest = next(iter(self._blocks.values()), None)
            if oldest is None or oldest in path[:1]:  # of `path` the first is the oldest
                return False
            self._drop(oldest)
        return True


def _keys(salt: str, tokens: Sequence[int], path: Sequence[Block]) -> Iterator[Key]:
    """Yield the key of each block; the caller appends the block to `path` in between."""
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        before = path[-1].number if path else salt
        yield before, tuple(tokens[start : start + BLOCK])


def block_bytes(engines: Iterable[EngineInfo]) -> int:
    return BLOCK * sum(info.token_bytes for info in engines)

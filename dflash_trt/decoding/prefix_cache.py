"""Bookkeeping of cached prefixes, which both engines keep outside their slots.

Prefixes are kept in blocks of `BLOCK` tokens. A block is keyed by the block before it and its own
tokens (exact tokens where vLLM uses hashes), so that texts with a common prefix share blocks. The
engines do the copies that `VerifyInput.batch` lists.
"""

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from dflash_trt.engines import KEPT, EngineInfo

BLOCK = 16  # tokens; a partial last block is prefilled again
Key = tuple[str | int, tuple[int, ...]]  # cache salt or number of the previous block; tokens


@dataclass(slots=True, eq=False)
class Block:
    """KV rows of `BLOCK` tokens, under the same number in both engines."""

    key: Key
    number: int
    drafted: bool  # whether the drafter has its rows too
    owner: object | None  # its next step stores the block; others cannot use it yet
    pins: int = 0  # running steps that copy it


class PrefixCache:
    """Prefix cache shared by the schedulers of all slot groups; an owner is one of their `Slots`.

    A block returned to an owner stays until `done`. The least recently used block is evicted first,
    and never before the blocks that follow it.
    """

    def __init__(self, blocks: int) -> None:
        """Make an empty cache of at most `blocks` blocks."""
        self._most = blocks
        self._blocks: OrderedDict[Key, Block] = OrderedDict()  # least recently used first
        self._numbers = KEPT  # the next block's
        self._dropped: list[int] = []  # to be dropped by the engines
        self._dropping: defaultdict[object, list[int]] = defaultdict(list)  # by owner
        self._pinned: defaultdict[object, list[Block]] = defaultdict(list)
        self._held = False
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._blocks)

    def find(
        self, owner: object, salt: str, tokens: Sequence[int], *, drafted: bool
    ) -> list[Block]:
        """Return the cached blocks of a prompt's prefix, never of its last token.

        drafted: only blocks that the drafter has too.
        """
        found = list[Block]()
        with self._lock:
            for key in _keys(salt, tokens[:-1], found):
                block = self._blocks.get(key)
                if block is None or block.owner not in (None, owner):
                    break
                if drafted and not block.drafted:
                    break
                self._pin(owner, block, found)
            self._touch(found)
        return found

    def keep(
        self, owner: object, salt: str, tokens: Sequence[int], drafted: int
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Insert a sequence's blocks; the drafter's cache holds the first `drafted` tokens.

        Returns what the owner's next step must do: block numbers to drop; (number, first token) of
        each block to store.
        """
        path, stored = list[Block](), list[tuple[int, int]]()
        with self._lock:
            for key in _keys(salt, tokens, path):
                start = BLOCK * len(path)
                seen = start + BLOCK <= drafted
                block = self._blocks.get(key)
                if block is None:
                    if self._held or not self._make_room():
                        break
                    block = self._blocks[key] = Block(key, self._numbers, seen, owner)
                    self._numbers += 1
                    stored.append((block.number, start))
                elif seen and not block.drafted and block.owner in (None, owner):
                    block.drafted, block.owner = True, owner
                    stored.append((block.number, start))
                self._pin(owner, block, path)
            self._touch(path)
            dropped, self._dropped = self._dropped, []
            self._dropping[owner] += dropped
        return dropped, stored

    def done(self, owner: object) -> None:
        """Mark the owner's step as finished: others may use the blocks it stored."""
        with self._lock:
            for block in self._pinned[owner]:
                if block.owner is owner:
                    block.owner = None
            self._dropping.pop(owner, None)
            self._unpin(owner)

    def clear(self, owner: object) -> None:
        """Drop all blocks after the owner's step failed, because the engines' state is unknown."""
        with self._lock:
            self._dropped += self._dropping.pop(owner, [])
            self._forget()
            self._unpin(owner)

    def hold(self, held: bool) -> None:
        """Clear the cache and add nothing while held is true."""
        with self._lock:
            self._held = held
            if held:
                self._forget()

    def _forget(self) -> None:
        blocks, self._blocks = self._blocks, OrderedDict()
        self._dropped += [block.number for block in blocks.values() if not block.pins]

    def _pin(self, owner: object, block: Block, path: list[Block]) -> None:
        block.pins += 1
        self._pinned[owner].append(block)
        path.append(block)

    def _touch(self, path: Sequence[Block]) -> None:
        """Mark blocks as recently used, the first one last, so that it is evicted last."""
        for block in reversed(path):
            self._blocks.move_to_end(block.key)

    def _unpin(self, owner: object) -> None:
        for block in self._pinned.pop(owner, []):
            block.pins -= 1
            if not block.pins and self._blocks.get(block.key) is not block:  # dropped meanwhile
                self._dropped.append(block.number)

    def _make_room(self) -> bool:
        """Evict a block if the cache is full; return whether there is room."""
        if len(self._blocks) < self._most:
            return True
        for block in self._blocks.values():
            if not block.pins:
                del self._blocks[block.key]
                self._dropped.append(block.number)
                return True
        return False


def _keys(salt: str, tokens: Sequence[int], path: Sequence[Block]) -> Iterator[Key]:
    """Yield the key of each block; the caller appends the block to `path` in between."""
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        yield path[-1].number if path else salt, tuple(tokens[start : start + BLOCK])


def block_bytes(engines: Iterable[EngineInfo]) -> int:
    """Return the bytes of one block in all engines."""
    return BLOCK * sum(info.token_bytes for info in engines)

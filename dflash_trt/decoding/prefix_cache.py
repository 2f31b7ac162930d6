"""Which prefixes both models' engines keep beside their slots, for requests that begin alike.

What is kept are blocks of `BLOCK` tokens (vLLM's hash blocks, by exact tokens instead of hashes): a
block is found by the block before it and its own tokens, so that texts which begin alike share
theirs. This is the bookkeeping alone; the engines copy as `VerifyInput.batch` says.
"""

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from dflash_trt.engines import KEPT, EngineInfo

BLOCK = 16  # tokens: what follows the last whole block is prefilled again
Key = tuple[str | int, tuple[int, ...]]  # the salt, or the number of the block before; the tokens


@dataclass(slots=True, eq=False)
class Block:
    """The KV rows of `BLOCK` tokens, in both engines under one number."""

    key: Key
    number: int
    drafted: bool  # whether the drafter's are there too
    owner: object | None  # whose next round stores it: for others it is not there yet
    pins: int = 0  # steps under way that copy it


class PrefixCache:
    """Shared by the schedulers of all groups of slots; an owner is one of their `Slots`.

    A block that an owner is told of stays until `done`. The least recently used one goes, and
    never before those that follow it.
    """

    def __init__(self, blocks: int) -> None:
        """blocks: how many there are at most."""
        self._most = blocks
        self._blocks: OrderedDict[Key, Block] = OrderedDict()  # least recently used first
        self._numbers = KEPT  # the next block's
        self._dropped: list[int] = []  # blocks that the engines still have
        self._dropping: defaultdict[object, list[int]] = defaultdict(list)  # by the owner's step
        self._pinned: defaultdict[object, list[Block]] = defaultdict(list)
        self._held = False
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._blocks)

    def find(self, owner: object, salt: str, tokens: Seq[int], *, drafted: bool) -> list[Block]:
        """The first blocks of a prompt, all but its last token at most.

        drafted: only those that the drafter has seen.
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
        self, owner: object, salt: str, tokens: Seq[int], drafted: int
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Take in the blocks of a text, of which the drafter has seen so many tokens.

        What the owner's next step has to do: numbers to drop; the number and first token of each
        block to store.
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
        """The owner's step has done what it was told: all may use what it stored."""
        with self._lock:
            for block in self._pinned[owner]:
                if block.owner is owner:
                    block.owner = None
            self._dropping.pop(owner, None)
            self._unpin(owner)

    def clear(self, owner: object) -> None:
        """The owner's step failed, and nobody knows what the engines have: forget all of it."""
        with self._lock:
            self._dropped += self._dropping.pop(owner, [])
            self._forget()
            self._unpin(owner)

    def hold(self, held: bool) -> None:
        """held: forget all of it, and keep nothing until it is no longer held."""
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

    def _touch(self, path: Seq[Block]) -> None:
        """The first as the most recently used: so that no block goes before its next."""
        for block in reversed(path):
            self._blocks.move_to_end(block.key)

    def _unpin(self, owner: object) -> None:
        for block in self._pinned.pop(owner, []):
            block.pins -= 1
            if not block.pins and self._blocks.get(block.key) is not block:  # cleared meanwhile
                self._dropped.append(block.number)

    def _make_room(self) -> bool:
        """Whether there may be one more block."""
        if len(self._blocks) < self._most:
            return True
        for block in self._blocks.values():
            if not block.pins:
                del self._blocks[block.key]
                self._dropped.append(block.number)
                return True
        return False


def _keys(salt: str, tokens: Seq[int], path: Seq[Block]) -> Iterator[Key]:
    """Of one block after the other; path: those so far, which the caller extends."""
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        yield path[-1].number if path else salt, tuple(tokens[start : start + BLOCK])


def block_bytes(engines: Iterable[EngineInfo]) -> int:
    """Memory of a block, of all models."""
    return BLOCK * sum(info.token_bytes for info in engines)

"""Common base of engines: steps bound once, caches moved in place."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from dflash_trt.engines.info import EngineInfo
from dflash_trt.engines.step import (
    FIRST_BLOCK,
    NOTHING,
    BoundSteps,
    Step,
    cache_names,
    token_moves,
)


class LoadedEngine(ABC):
    """An `engines.step.Engine` over arrays of numpy or torch."""

    visible_step: int

    def __init__(self, info: EngineInfo, most: int) -> None:
        """Set up; most: number of steps that stay bound."""
        self.info = info
        self._steps = BoundSteps(most)
        self._room: dict[str, tuple[int, Any]] = {}
        self._alike: list[Any] = []  # by shape: [caches, slots, heads, rows, head_dim]
        self._caches: dict[str, Any] = {}
        self.least_rows = 1
        self._blocks: dict[int, list[Any]] = {}  # kept tokens by number, by group

    @abstractmethod
    def _zeros(self, shape: tuple[int, ...]) -> Any:
        """Allocate memory for KV caches."""

    @abstractmethod
    def _copy(self, source: Any, destination: Any) -> None: ...

    @abstractmethod
    def _bind(
        self, row: int, n: int, width: int, visible: int, scored: int, context: int
    ) -> Step: ...

    def step(
        self, row: int, n: int, width: int, visible: int, scored: int, context: int = 0
    ) -> Step:
        """Return the bound step; see `engines.step.Engine`."""
        return self._steps.of(self._bind, row, n, width, visible, scored, context)

    def move_row(self, source: int, destination: int, tokens: int, start: int = 0) -> None:
        """Copy within the caches; see `engines.step.Engine`."""
        if destination == NOTHING:
            self._blocks.pop(source, None)
            return
        if destination >= FIRST_BLOCK:
            self._blocks[destination] = [
                self._zeros((len(x), x.shape[2], tokens, x.shape[4])) for x in self._alike
            ]
        for i, caches in enumerate(self._alike):
            rows = caches[:, :, :, start : start + tokens]
            found, moved = (
                self._blocks[row][i] if row >= FIRST_BLOCK else rows[:, row]
                for row in (source, destination)
            )
            self._copy(self._zeros((1,)) if source == NOTHING else found, moved)

    def compact_tokens(self, row: int, start: int, kept: Sequence[int]) -> None:
        """Compact a tree's accepted tokens; see `engines.step.Engine`."""
        moves = token_moves(start, kept)
        for caches in self._alike:
            for source, destination in moves:
                self._copy(caches[:, row, :, source], caches[:, row, :, destination])

    def _make_caches(self) -> None:
        for (heads, head_dim), names in cache_names(self.info).items():
            shape = (len(names), self.info.slots, heads, self.info.cache_len, head_dim)
            self._alike.append(self._zeros(shape))
            self._caches.update(zip(names, self._alike[-1], strict=True))

    def _buffer(self, name: str, shape: tuple[int, ...], make: Callable[[int], Any]) -> Any:
        """Return the buffer of this name, made by `make(size)`; shared, because it may be large."""
        size = math.prod(shape)
        room, buffer = self._room.get(name, (0, None))
        if buffer is None or room < size:
            # doubled, so that it seldom grows: unused memory takes only addresses
            room = size if buffer is None else 2 * size
            buffer = make(room)
            self._room[name] = room, buffer
            self._steps.clear()  # they reference the old buffer
        return buffer

"""PyTorch's CUDA graphs as its documentation says they behave, on the CPU.

Follows `torch.cuda.CUDAGraph` and the notes "CUDA Graphs" of PyTorch 2.13. A capture runs in a
stream that is not the default one; work in it is recorded and does not run; the host may not wait
for anything, nor read a number. A replay repeats the work on the same memory, whatever is there by
then. Graphs of one pool share memory: a replay may overwrite what others have allocated, so here it
fills all of that with NaN or a large number. A graph knows other memory by its address alone: a
replay fails where it is gone. A pool is gone with the last of its graphs, and then takes no more
(CUDACachingAllocator's assertion `use_count > 0`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from dflash_trt.engines import gpu

SPOILT = 2**40 + 1  # an integer in memory that another graph uses
READS = ("_local_scalar_dense", "nonzero", "masked_select")  # calls that wait for a number


class State:
    stream: Stream | None = None  # the current one; None: the default
    capture: Capture | None = None


class Stream:
    cuda_stream = 7

    def synchronize(self) -> None:
        assert State.capture is None, "a stream that is captured cannot be waited for"

    def wait_stream(self, other: Stream) -> None:
        assert State.capture is None, "a stream that is captured waits for no other"


@contextmanager
def stream(chosen: Stream) -> Iterator[None]:
    before, State.stream = State.stream, chosen
    try:
        yield
    finally:
        State.stream = before


@dataclass(frozen=True)
class Address:
    """A tensor that was there before a capture."""

    storage: StorageWeakRef
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> Address:
        storage = StorageWeakRef(tensor.untyped_storage())
        return cls(storage, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())

    def tensor(self) -> Tensor:
        assert not self.storage.expired(), "a graph reads memory that is gone"
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        empty = torch.empty(0, dtype=self.dtype)
        return empty.set_(storage, self.offset, self.size, self.stride)


class Work:
    """One call of PyTorch, which writes its results where they were when it was recorded.

    made: addresses of memory that the capture has allocated, which lives as long as its graph.
    """

    def __init__(self, call: Any, given: Any, results: Sequence[Tensor], made: set[int]) -> None:
        def keep(value: Any) -> Any:
            outside = isinstance(value, Tensor) and _address(value) not in made
            return Address.of(value) if outside else value

        self._call, self._given = call, tree_map(keep, given)
        before = {_address(each) for each in tree_leaves(given) if isinstance(each, Tensor)}
        self.made = [result for result in results if _address(result) not in before]

    def run(self) -> None:
        args, kwargs = tree_map(
            lambda value: value.tensor() if isinstance(value, Address) else value,
            self._given,
            is_leaf=lambda value: isinstance(value, Address),
        )
        if not self.made and not written(self._call, args):
            return
        results = tree_leaves(self._call(*args, **kwargs))
        if self.made:
            for memory, result in zip(self.made, results, strict=True):
                memory.copy_(result)

    def spoil(self) -> None:
        for memory in self.made:
            floating = memory.is_floating_point()
            limit = (
                torch.iinfo(memory.dtype).max if not floating and memory.dtype != torch.bool else 1
            )
            memory.fill_(float("nan") if floating else min(SPOILT, limit))


def written(call: Any, args: Sequence[Any]) -> list[Tensor]:
    """Return the arguments that a call writes."""
    return [
        value
        for value, argument in zip(args, call._schema.arguments, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Capture(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.works: list[Work] = []
        self._made: set[int] = set()
        self._before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert call._schema.name.split("::")[1] not in READS, f"{call} waits for the GPU"
        self._before += [(memory, memory.clone()) for memory in written(call, args)]
        results = call(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves(results) if isinstance(each, Tensor)]
        work = Work(call, (args, kwargs or {}), tensors, self._made)
        self._made |= {_address(made) for made in work.made}
        self.works.append(work)
        return results

    def undo(self) -> None:
        """Restore what was written: a capture runs nothing."""
        for memory, content in reversed(self._before):
            memory.copy_(content)


class Pool:
    """Memory that graphs share."""

    def __init__(self) -> None:
        self.graphs: weakref.WeakSet[CUDAGraph] = weakref.WeakSet()
        self.was_used = False


class CUDAGraph:
    made: ClassVar[weakref.WeakSet[CUDAGraph]] = weakref.WeakSet()

    def __init__(self) -> None:
        self._works: list[Work] = []
        self._pool = Pool()
        self.replays = 0

    def capture_begin(self, pool: Pool, capture_error_mode: str) -> None:
        assert State.stream is not None, "a capture in the default stream"
        assert State.capture is None, "a capture within another"
        assert capture_error_mode in ("global", "thread_local", "relaxed")
        assert pool.graphs or not pool.was_used, "a pool whose graphs are gone"
        self._pool, State.capture = pool, Capture()
        pool.was_used = True
        State.capture.__enter__()

    def capture_end(self) -> None:
        capture = State.capture
        assert capture is not None
        capture.__exit__(None, None, None)
        State.capture = None
        capture.undo()
        self._works = capture.works
        self._spoil()
        self._pool.graphs.add(self)
        CUDAGraph.made.add(self)

    def replay(self) -> None:
        assert State.capture is None, "a replay within a capture"
        for other in self._pool.graphs:
            if other is not self:
                other._spoil()
        for work in self._works:
            work.run()
        self.replays += 1

    def _spoil(self) -> None:
        for work in self._works:
            work.spoil()


def recorded_steps() -> list[CUDAGraph]:
    """Return graphs that were launched."""
    return [graph for graph in CUDAGraph.made if graph.replays]


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines of kind pytorch find a GPU, which is this process's memory."""
    monkeypatch.setattr(CUDAGraph, "made", weakref.WeakSet())
    pool = Pool()
    fakes = {
        "CUDAGraph": CUDAGraph,
        "Stream": Stream,
        "graph_pool_handle": lambda: pool,
        "is_available": lambda: True,
        "set_device": lambda index: None,
        "stream": stream,
        "current_stream": lambda: State.stream or Stream(),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(gpu.Gpu, "device", "cpu")
    monkeypatch.setattr(gpu.Gpu, "pinned_zeros", gpu.Gpu.zeros)

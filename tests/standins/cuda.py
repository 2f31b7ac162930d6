"""PyTorch's CUDA graphs as its documentation says they behave, on the CPU.

Follows `torch.cuda.CUDAGraph` and the notes "CUDA Graphs" of PyTorch 2.13. A capture runs in a
stream that is not the default one; work in it is recorded and does not run; the host may not wait
for anything, nor read a number. A replay repeats the work on the same memory, whatever is there by
then. Graphs of one pool share memory: a replay may overwrite what others have allocated, so here it
fills all of that with NaN or a large number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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


class Work:
    """One call of PyTorch, which writes its results where they were when it was recorded."""

    def __init__(self, call: Any, args: Any, kwargs: Any, results: Sequence[Tensor]) -> None:
        self._again = lambda: tree_leaves(call(*args, **kwargs))
        given = {_address(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        self.made = [result for result in results if _address(result) not in given]
        self.writes = [
            value
            for value, argument in zip(args, call._schema.arguments, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]

    def run(self) -> None:
        if self.made:
            for memory, result in zip(self.made, self._again(), strict=True):
                memory.copy_(result)
        elif self.writes:
            self._again()

    def spoil(self) -> None:
        for memory in self.made:
            floating = memory.is_floating_point()
            limit = (
                torch.iinfo(memory.dtype).max if not floating and memory.dtype != torch.bool else 1
            )
            memory.fill_(float("nan") if floating else min(SPOILT, limit))


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Capture(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.works: list[Work] = []
        self._before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert call._schema.name.split("::")[1] not in READS, f"{call} waits for the GPU"
        work = Work(call, args, kwargs or {}, [])
        self._before += [(memory, memory.clone()) for memory in work.writes]
        results = call(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves(results) if isinstance(each, Tensor)]
        self.works.append(Work(call, args, kwargs or {}, tensors))
        return results

    def undo(self) -> None:
        """Restore what was written: a capture runs nothing."""
        for memory, content in reversed(self._before):
            memory.copy_(content)


class CUDAGraph:
    made: ClassVar[list[CUDAGraph]] = []

    def __init__(self) -> None:
        self._works: list[Work] = []
        self._pool: object = None
        self.replays = 0

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        assert State.stream is not None, "a capture in the default stream"
        assert State.capture is None, "a capture within another"
        assert capture_error_mode in ("global", "thread_local", "relaxed")
        self._pool, State.capture = pool, Capture()
        State.capture.__enter__()

    def capture_end(self) -> None:
        capture = State.capture
        assert capture is not None
        capture.__exit__(None, None, None)
        State.capture = None
        capture.undo()
        self._works = capture.works
        self._spoil()
        CUDAGraph.made.append(self)

    def replay(self) -> None:
        assert State.capture is None, "a replay within a capture"
        for other in CUDAGraph.made:
            if other is not self and other._pool is self._pool:
                other._spoil()
        for work in self._works:
            work.run()
        self.replays += 1

    def _spoil(self) -> None:
        for work in self._works:
            work.spoil()


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines of kind pytorch find a GPU, which is this process's memory."""
    monkeypatch.setattr(CUDAGraph, "made", [])
    pool = object()
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

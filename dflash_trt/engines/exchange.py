"""Memory that the ranks of an engine share: the inputs of a step, and what they add up.

A rank's part of a collective lies in its own slot; when all have written theirs, each reads them
all. Two buffers take turns: who writes into one again has met everybody since they read it. The
last collective of a step has a third, since only rank 0 reads what comes after it.

Ranks wait for each other by POSIX semaphores, one for each pair and direction, which also order the
memory accesses around them on every processor. A rank that waits looks again and again, because
the others are nearly always as far.
"""

import ctypes
import math
import mmap
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_trt.errors import EngineError

Array = npt.NDArray[Any]
# asked while waiting, with who is awaited and for how many seconds by now; raises to end it
Check = Callable[[int, float], None]

LAST = 2  # the buffer of a step's last collective
HEAD, SEMAPHORE = 1 << 16, 64  # bytes of all semaphores, and of one with room around it
AREA = 1 << 32  # bytes of addresses for the inputs, and for each slot; memory is what is used
SPIN = 0.001  # seconds of looking without a pause
PAUSE = 0.0001  # seconds between two looks after that

# without letting go of the interpreter lock, which takes longer than the call
_libc = ctypes.PyDLL(None)


class Exchange:
    """One rank's view of the shared memory `fd` (see `create`)."""

    def __init__(self, fd: int, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.others = [other for other in range(ranks) if other != rank]
        self._memory = mmap.mmap(fd, _size(ranks))
        self._semaphores = [_at(self._memory, i * SEMAPHORE) for i in range(ranks * ranks)]

    def inputs(self, like: Mapping[str, npt.NDArray[Any]]) -> dict[str, Array]:
        """Arrays of these shapes, one behind the other, in the area that rank 0 fills."""
        found, at = {}, HEAD
        for name, array in like.items():
            found[name] = self._view(at, array.shape, array.dtype)
            at += -(-array.nbytes // 64) * 64
        return found

    def slots(self, buffer: int, shape: tuple[int, ...]) -> list[Array]:
        """Every rank's part of a collective, float32, in one of the three buffers."""
        first = HEAD + AREA * (1 + buffer * self.ranks)
        return [
            self._view(first + AREA * rank, shape, np.dtype(np.float32))
            for rank in range(self.ranks)
        ]

    def tell(self, ranks: Iterable[int]) -> None:
        """Let these ranks go on."""
        for other in ranks:
            _libc.sem_post(self._semaphores[self.rank * self.ranks + other])

    def wait(self, ranks: Iterable[int], check: Check) -> None:
        """Until each of them has told this rank once."""
        for other in ranks:
            semaphore = self._semaphores[other * self.ranks + self.rank]
            start = time.perf_counter()
            while _libc.sem_trywait(semaphore):
                seconds = time.perf_counter() - start
                if seconds < SPIN:
                    os.sched_yield()
                else:
                    check(other, seconds)
                    time.sleep(PAUSE)

    def meet(self, check: Check) -> None:
        """Until all ranks are here."""
        self.tell(self.others)
        self.wait(self.others, check)

    def _view(self, at: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        count = math.prod(shape)
        if (at - HEAD) % AREA + count * dtype.itemsize > AREA:
            raise EngineError(
                f"a tensor of {count * dtype.itemsize / 1e9:.1f} GB is too large to be shared",
                "Lower serving.prefill_chunk or serving.slots",
            )
        return np.frombuffer(self._memory, dtype, count, at).reshape(shape)


def create(ranks: int) -> int:
    """Shared memory for so many ranks: a file descriptor without a name, gone with its users."""
    if not hasattr(os, "memfd_create"):
        raise EngineError(
            "ranks on CPUs share memory as Linux does it", "Build with tensor_parallel_size 1"
        )
    fd = os.memfd_create("dflash-trt")
    os.ftruncate(fd, _size(ranks))
    with mmap.mmap(fd, HEAD) as memory:
        for i in range(ranks * ranks):
            _libc.sem_init(_at(memory, i * SEMAPHORE), 1, 0)
    return fd


def _size(ranks: int) -> int:
    return HEAD + AREA * (1 + (LAST + 1) * ranks)


def _at(memory: mmap.mmap, offset: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory, offset)))

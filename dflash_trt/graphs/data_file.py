"""`model.onnx.data`: a graph's weights one after the other, read, digested and written at once."""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, cycle
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dflash_trt.checkpoints import Span
from dflash_trt.digests import Entry, begin

ALIGNMENT = 4096  # bytes: a tensor that is mapped into memory begins on a page
CHUNK, BUFFERS = 1 << 19, 12  # bytes copied at a time, and how many such are on their way
WRITERS = 4  # threads: one alone takes longer to hand a file to the kernel
FLUSH = 1 << 26  # bytes that the disk begins with while more are written
WORKERS = min(4, os.cpu_count() or 1)
IN_FLIGHT = 1 << 28  # bytes of computed tensors in memory at a time, beside one that is larger

Compute = Callable[[], npt.NDArray[np.generic]]


class DataFile:
    """Collects tensors; `write` copies those that lie in files and computes the others."""

    def __init__(self) -> None:
        self._size = 0
        self._tensors: list[tuple[str, int, int, Sequence[Span] | Compute]] = []

    def add(self, name: str, size: int, source: Sequence[Span] | Compute) -> int:
        """Take in a tensor of `size` bytes; returns its offset in the file."""
        offset = self._size + -self._size % ALIGNMENT
        self._tensors.append((name, offset, size, source))
        self._size = offset + size
        return offset

    def write(self, file: Path, done: Callable[[str], None]) -> Entry:
        """Write it all; `done` is called with each name. Returns a manifest's entry of the file."""
        kind, digest = begin(self._size)
        with (
            file.open("wb", buffering=0) as stream,
            ThreadPoolExecutor(1) as hasher,  # in order
            ThreadPoolExecutor(WRITERS) as writers,
        ):
            place, end, held = stream.fileno(), 0, 0
            waiting: deque[tuple[int, Future[object], Future[None]]] = deque()
            flushed = finished = 0
            for chunk in chain(self._chunks(done), [None]):
                if chunk is not None:
                    hashed = hasher.submit(digest.update, chunk)
                    waiting.append((len(chunk), hashed, writers.submit(_write, place, chunk, end)))
                    end, held = end + len(chunk), held + len(chunk)
                while waiting and (chunk is None or len(waiting) >= BUFFERS or held > IN_FLIGHT):
                    size, hashed, written = waiting.popleft()
                    hashed.result()
                    written.result()
                    finished, held = finished + size, held - size
                if finished - flushed >= FLUSH:
                    # its side effect is wanted: the disk begins to write, and nobody waits
                    os.posix_fadvise(place, flushed, finished - flushed, os.POSIX_FADV_DONTNEED)
                    flushed = finished
            assert end == self._size
        return {kind: digest.hexdigest(), "size": self._size}

    def _chunks(self, done: Callable[[str], None]) -> Iterator[memoryview]:
        """All bytes in order; a chunk holds until `BUFFERS - 1` others have been made."""
        buffers, end = cycle([memoryview(bytearray(CHUNK)) for _ in range(BUFFERS)]), 0
        with ThreadPoolExecutor(WORKERS) as pool:
            computed = self._computed(pool)
            for name, offset, size, source in self._tensors:
                if offset > end:
                    yield memoryview(bytes(offset - end))
                if callable(source):
                    yield next(computed).data
                else:
                    for span in source:
                        yield from span.read(buffers)
                end = offset + size
                done(name)

    def _computed(self, pool: ThreadPoolExecutor) -> Iterator[npt.NDArray[np.uint8]]:
        """The computed tensors in order, a few ahead."""
        waiting: deque[tuple[int, Future[npt.NDArray[np.uint8]]]] = deque()
        for _, _, size, source in self._tensors:
            if not callable(source):
                continue
            while waiting and (
                len(waiting) >= 2 * WORKERS or size + sum(n for n, _ in waiting) > IN_FLIGHT
            ):
                yield waiting.popleft()[1].result()
            waiting.append((size, pool.submit(_bytes, source)))
        for _, future in waiting:
            yield future.result()


def _write(file: int, chunk: memoryview, at: int) -> None:
    while chunk:  # a call takes less than 2 GiB
        size = os.pwrite(file, chunk, at)
        chunk, at = chunk[size:], at + size


def _bytes(compute: Compute) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(compute()).reshape(-1).view(np.uint8)

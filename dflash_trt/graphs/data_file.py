"""Writer of `model.onnx.data`: concatenated weights, read, hashed and written in one pass."""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, cycle
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dflash_trt.checkpoints import Span
from dflash_trt.files import Entry, begin

ALIGNMENT = 4096  # bytes: memory-mapped tensors begin on a page
CHUNK, BUFFERS = 1 << 19, 12  # bytes per copy, and copies in flight
WRITERS = 4  # threads: one alone is slower at handing data to the kernel
FLUSH = 1 << 26  # bytes after which the disk starts writing
WORKERS = min(4, os.cpu_count() or 1)
IN_FLIGHT = 1 << 28  # bytes of computed tensors in memory, plus one larger tensor

Compute = Callable[[], npt.NDArray[np.generic]]


class DataFile:
    """Tensors of a data file; `write` copies those stored in files and computes the others."""

    def __init__(self) -> None:
        self._size = 0
        self._tensors: list[tuple[str, int, int, Sequence[Span] | Compute]] = []

    def add(self, name: str, size: int, source: Sequence[Span] | Compute) -> int:
        """Add a tensor of `size` bytes; return its offset in the file."""
        offset = self._size + -self._size % ALIGNMENT
        self._tensors.append((name, offset, size, source))
        self._size = offset + size
        return offset

    def write(self, file: Path, done: Callable[[str], None]) -> Entry:
        """Write the file; call `done` with each name. Returns its manifest entry."""
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
                    # for its side effect: the disk begins to write without anyone waiting
                    os.posix_fadvise(place, flushed, finished - flushed, os.POSIX_FADV_DONTNEED)
                    flushed = finished
            assert end == self._size
        return {kind: digest.hexdigest(), "size": self._size}

    def _chunks(self, done: Callable[[str], None]) -> Iterator[memoryview]:
        """Yield all bytes in order; a chunk is valid until `BUFFERS - 1` more are yielded."""
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
        """Yield the computed tensors in order, computing a few ahead."""
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
    while chunk:  # one call writes less than 2 GiB
        size = os.pwrite(file, chunk, at)
        chunk, at = chunk[size:], at + size


def _bytes(compute: Compute) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(compute()).reshape(-1).view(np.uint8)

"""`model.onnx.data`: a graph's weights one behind the other, read, digested and written at once."""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import cycle
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dflash_trt.checkpoints.stored import Span
from dflash_trt.digests import Entry, begin

ALIGNMENT = 4096  # bytes: a tensor that is mapped into memory begins on a page
CHUNK = 1 << 21  # bytes copied at a time: they stay in a core's cache until they are written
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
        (kind, digest), chunks = begin(self._size), self._chunks(done)

        def following() -> memoryview:
            chunk = next(chunks, memoryview(b""))
            digest.update(chunk)
            return chunk

        flushed = 0
        with file.open("wb", buffering=0) as stream, ThreadPoolExecutor(1) as beside:
            coming = beside.submit(following)
            while rest := coming.result():
                coming = beside.submit(following)
                while rest:  # a call takes less than 2 GiB
                    rest = rest[stream.write(rest) :]
                if stream.tell() - flushed >= FLUSH:
                    # asked for what it does first: the disk begins to write, and nobody waits
                    os.posix_fadvise(stream.fileno(), flushed, FLUSH, os.POSIX_FADV_DONTNEED)
                    flushed += FLUSH
            assert stream.tell() == self._size
        return {kind: digest.hexdigest(), "size": self._size}

    def _chunks(self, done: Callable[[str], None]) -> Iterator[memoryview]:
        """All bytes in order; a chunk holds while the next is made, no longer."""
        buffers, end = cycle([memoryview(bytearray(CHUNK)), memoryview(bytearray(CHUNK))]), 0
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


def _bytes(compute: Compute) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(compute()).reshape(-1).view(np.uint8)

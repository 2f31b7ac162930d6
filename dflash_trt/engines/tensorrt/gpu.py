"""Memory of one GPU, and one stream of work on it."""

import time
from collections.abc import Callable

import torch

SPIN = 0.001  # seconds of polling without a pause
PAUSE = 0.0001  # seconds between two polls after that


class Gpu:
    """A GPU and one stream: calls run in order, and `wait` waits for them."""

    def __init__(self, index: int) -> None:
        torch.cuda.set_device(index)
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.stream = int(self._stream.cuda_stream)  # as CUDA knows it
        # called while waiting, with rank 0 and the seconds so far; raises to end the wait
        self.check: Callable[[int, float], None] | None = None

    def memory(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        """Zeros on the GPU."""
        with torch.cuda.stream(self._stream):
            return torch.zeros(shape, dtype=getattr(torch, dtype), device="cuda")

    def host(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        """Zeros in pinned memory of the host."""
        return torch.zeros(shape, dtype=getattr(torch, dtype), pin_memory=True)

    def copy(self, source: torch.Tensor, to: torch.Tensor) -> None:
        """Copy between any two of these; returns before it is done."""
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record `work` as a CUDA graph; returns what launches it."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()

        def launch() -> None:
            with torch.cuda.stream(self._stream):
                graph.replay()

        return launch

    def wait(self) -> None:
        """Wait until all calls are done."""
        if self.check is None:
            self._stream.synchronize()
            return
        start = time.perf_counter()
        while not self._stream.query():  # NCCL waits for ever for a rank that is gone
            seconds = time.perf_counter() - start
            if seconds > SPIN:
                self.check(0, seconds)
                time.sleep(PAUSE)

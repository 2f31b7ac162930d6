"""Memory of one GPU, and one stream of work on it."""

import time
from collections.abc import Callable

import torch

SPIN = 0.001  # seconds of looking without a pause
PAUSE = 0.0001  # seconds between two looks after that


class Gpu:
    """What is called here happens in the order of the calls; `wait` waits for it."""

    def __init__(self, index: int) -> None:
        torch.cuda.set_device(index)
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.stream = int(self._stream.cuda_stream)  # as CUDA knows it
        # asked while waiting, with 0 and for how many seconds; raises to end it
        self.check: Callable[[int, float], None] | None = None

    def memory(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        """Zeros on the GPU."""
        with torch.cuda.stream(self._stream):
            return torch.zeros(shape, dtype=getattr(torch, dtype), device="cuda")

    def host(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        """Zeros in memory of the host that the GPU reads and writes by itself."""
        return torch.zeros(shape, dtype=getattr(torch, dtype), pin_memory=True)

    def copy(self, source: torch.Tensor, to: torch.Tensor) -> None:
        """Between any two of these."""
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """What `work` would do, as one CUDA graph to be launched."""
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
        """Until all of it is done."""
        if self.check is None:
            self._stream.synchronize()
            return
        start = time.perf_counter()
        while not self._stream.query():  # NCCL waits for ever for a rank that is gone
            seconds = time.perf_counter() - start
            if seconds > SPIN:
                self.check(0, seconds)
                time.sleep(PAUSE)

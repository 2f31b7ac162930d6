"""Memory and a stream of one GPU, and the common base of engines on GPUs."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from dflash_trt.engines.info import EngineInfo
from dflash_trt.engines.step import LoadedEngine, step_tensors

LARGE = ("features", "logits", "mask")  # tensors whose memory all steps share
Result = TypeVar("Result")


@dataclass(frozen=True)
class Both:
    """A tensor's memory on the host and on the GPU."""

    host: torch.Tensor | None  # None: it stays on the GPU
    memory: torch.Tensor

    @property
    def array(self) -> Any:
        """What callers read and fill: numpy's, or the tensor that stays on the GPU."""
        return self.memory if self.host is None else self.host.numpy()

    def cut(self, shape: tuple[int, ...]) -> "Both":
        """Return the beginning of flat memory in this shape."""
        size = math.prod(shape)
        host = None if self.host is None else self.host[:size].view(shape)
        return Both(host, self.memory[:size].view(shape))

    def upload(self, gpu: "Gpu") -> None:
        if self.host is not None:
            gpu.copy(self.host, self.memory)

    def download(self, gpu: "Gpu") -> None:
        if self.host is not None:
            gpu.copy(self.memory, self.host)


@dataclass(frozen=True)
class _Recorded:
    """A CUDA graph, and the work of which it has addresses alone: its tensors have to live on."""

    stream: torch.cuda.Stream
    graph: torch.cuda.CUDAGraph
    work: Callable[[], object]

    def __call__(self) -> None:
        with torch.cuda.stream(self.stream):
            self.graph.replay()


class Gpu:
    """A GPU and one stream: calls run in order, and `wait` waits for them.

    Others may use its tensors in the stream that is current for them, after `wait`; `follow` waits
    for what they do.
    """

    device = "cuda"

    def __init__(self, index: int) -> None:
        torch.cuda.set_device(index)
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.stream = int(self._stream.cuda_stream)  # CUDA's handle
        self._pool = torch.cuda.graph_pool_handle()  # graphs run one at a time: they share memory
        # PyTorch takes no pool again whose graphs are all gone (vLLM issue 28426)
        self._first = self.record(partial(torch.zeros, 1, device=self.device))

    def zeros(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        with torch.cuda.stream(self._stream):
            return torch.zeros(shape, dtype=getattr(torch, dtype), device=self.device)

    def pinned_zeros(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        return torch.zeros(shape, dtype=getattr(torch, dtype), pin_memory=True)

    def copy(self, source: torch.Tensor, to: torch.Tensor) -> None:
        """Start a copy between any two tensors; does not wait."""
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)

    def run(self, work: Callable[[], Result]) -> Result:
        """Return what `work` returns, whose calls are in this stream; does not wait for them."""
        with torch.cuda.stream(self._stream):
            return work()

    def record(self, work: Callable[[], object]) -> Callable[[], object]:
        """Record `work` as a CUDA graph, which does not run it; return what launches it.

        What it allocates is overwritten by other graphs: results are to be copied elsewhere.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        return _Recorded(self._stream, graph, work)

    def follow(self) -> None:
        """Let later calls come after those that others made; the host does not wait."""
        self._stream.wait_stream(torch.cuda.current_stream())

    def wait(self) -> None:
        self._stream.synchronize()


class GpuEngine(LoadedEngine):
    """An engine on a GPU; inputs and outputs have host copies.

    Features have none where target and drafter are in one process: there they stay on the GPU.
    """

    _gpu: Gpu

    def __init__(self, info: EngineInfo, most_steps: int, *, features_stay: bool) -> None:
        super().__init__(info, most_steps)
        self._features_stay = features_stay

    def _copy(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        self._gpu.copy(source, destination)

    def _allocate_tensors(
        self, n: int, width: int, visible: int, scored_tokens: int, context: int
    ) -> tuple[dict[str, Both], dict[str, Both]]:
        # others may still read memory that is freed here because it grows
        self._gpu.follow()
        inputs, outputs = (
            {name: self._buffers(name, dtype.__name__, shape) for name, (dtype, shape) in x.items()}
            for x in step_tensors(self.info, n, width, visible, scored_tokens, context)
        )
        self._gpu.wait()  # others may fill features at once, in another stream
        return inputs, outputs

    def _buffers(self, name: str, dtype: str, shape: tuple[int, ...]) -> Both:
        dtype, gpu = dtype.rstrip("_"), self._gpu  # numpy's bool_
        if name not in LARGE:
            return Both(gpu.pinned_zeros(shape, dtype), gpu.zeros(shape, dtype))
        stays = name == "logits" or (name == "features" and self._features_stay)

        def make(size: int) -> Both:
            memory = gpu.zeros((size,), dtype)
            return Both(None if stays else gpu.pinned_zeros((size,), dtype), memory)

        # features and logits may become far larger than they mostly are; a mask is small
        room = (self._largest_mask,) if name == "mask" else shape
        whole: Both = self._buffer(name, room, make)
        return whole.cut(shape)

    @property
    def _largest_mask(self) -> int:
        """The numbers of the largest round's or prompt's."""
        info = self.info
        return info.cache_len * max(info.slots * info.most_verified, info.widest)


class Outputs(dict[str, Any]):
    """Outputs by name; logits, which no round needs on the host, are copied on access."""

    def __init__(self, gpu: Gpu, outputs: dict[str, Both], logits: torch.Tensor) -> None:
        super().__init__((name, both.array) for name, both in outputs.items())
        self._gpu, self._logits = gpu, logits

    def __missing__(self, name: str) -> Any:
        if name != "logits":
            raise KeyError(name)
        host = self._gpu.pinned_zeros(tuple(self._logits.shape), "float32")
        self._gpu.copy(self._logits, host)
        self._gpu.wait()
        return host.numpy()

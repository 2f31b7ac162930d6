"""The `pytorch` engine: loads a graph and steps it on one NVIDIA GPU.

Without a GPU it runs on the CPU, node by node: for tests, not for serving.
"""

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from dflash_trt.engines.gpu import Both, Gpu, GpuEngine, Outputs, Result
from dflash_trt.engines.info import padded_size, read_info
from dflash_trt.engines.pytorch import GRAPH_FILE
from dflash_trt.engines.pytorch.program import Calls, Program
from dflash_trt.engines.step import Bounded, DeviceStep, Step
from dflash_trt.engines.tensorrt.library import compute_capabilities
from dflash_trt.errors import EngineError

log = logging.getLogger(__name__)
BOUND_STEPS = 512  # each may be recorded
VISIBLE_STEP = 1024  # masked keys cost little, and a new size is recorded anew


class Cpu(Gpu):
    """The host in place of a GPU: all is done at once, and nothing recorded."""

    device = "cpu"

    def __init__(self) -> None:
        pass

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        return torch.zeros(shape, dtype=getattr(torch, dtype))

    pinned_zeros = zeros

    def copy(self, source: Tensor, to: Tensor) -> None:
        to.copy_(source)

    def run(self, work: Callable[[], Result]) -> Result:
        return work()

    def record(self, work: Callable[[], object]) -> Callable[[], object]:
        return work

    def follow(self) -> None:
        pass

    def wait(self) -> None:
        pass


def check_pytorch() -> None:
    """Raise EngineError if there is a GPU that PyTorch cannot use."""
    if not torch.cuda.is_available() and compute_capabilities():
        raise EngineError(
            f"PyTorch {torch.__version__} cannot use the GPU that is here",
            "Install its build for this CUDA, and a driver that is not older: pytorch.org says how",
        )


class Engine(GpuEngine):
    visible_step = VISIBLE_STEP

    def __init__(self, directory: Path, alone: bool = False) -> None:
        info = read_info(directory)
        check_pytorch()
        super().__init__(info, BOUND_STEPS, features_stay=not alone)
        self._gpu = Gpu(0) if torch.cuda.is_available() else Cpu()
        self._dtype = getattr(torch, info.dtype)
        path, device = directory / GRAPH_FILE, self._gpu.device
        self._program = self._gpu.run(lambda: Program(path, self._dtype, device))
        self._has_kernels = False
        if self._gpu.device == "cuda":
            self.use_kernels()
        self._lowered: Bounded[Hashable, Calls] = Bounded(BOUND_STEPS)
        self._make_caches()
        self._gpu.wait()

    def use_kernels(self) -> None:
        """Run kernels from the next step on; log what has none."""
        # imported here: it needs Triton
        from dflash_trt.engines.pytorch.fusion import without_kernel  # noqa: PLC0415

        self._has_kernels = True
        names = without_kernel(self._program)
        if names:
            log.info(
                "%s: no kernel for %s: run as PyTorch's operators", self.info.role, ", ".join(names)
            )

    def _zeros(self, shape: tuple[int, ...]) -> Tensor:
        return self._gpu.zeros(shape, self.info.dtype)

    def _state_zeros(self, shape: tuple[int, ...]) -> Tensor:
        return self._gpu.zeros(shape, "float32")

    def _bind(
        self, first_slot: int, n: int, width: int, visible: int, scored_tokens: int, context: int
    ) -> Step:
        slots = slice(first_slot, first_slot + n)
        inputs, outputs = self._allocate_tensors(n, width, visible, scored_tokens, context)
        arrays = {name: both.array for name, both in inputs.items()}
        logits = outputs["logits"].memory
        bound = _Bound(
            gpu=self._gpu,
            lower=self._lower,
            weights=self._program.weights,
            caches={name: cache[slots] for name, cache in self._caches.items()},
            inputs=inputs,
            outputs=outputs,
            most_drafts=self.info.most_verified - 1,
            is_recorded=max(width, context) <= self.info.most_verified,
        )
        few = {name: both for name, both in outputs.items() if name != "logits"}
        on_device = DeviceStep(self._gpu, logits, bound.start)
        return Step(arrays, Outputs(self._gpu, few, logits), bound.run, on_device)

    def _lower(self, inputs: dict[str, Tensor], counts: tuple[int, int]) -> Calls:
        """Return the calls of a step, which are those of another one with the same sizes."""
        key = (counts, *(tuple(tensor.shape) for tensor in inputs.values()))
        return self._lowered.of(key, lambda: self._calls_of(inputs, counts))

    def _calls_of(self, inputs: dict[str, Tensor], counts: tuple[int, int]) -> Calls:
        known, replayed = counts
        if not self._has_kernels:
            return self._program.calls(inputs, known, replayed)
        # imported here: it needs Triton
        from dflash_trt.engines.pytorch.fusion import kernel_calls  # noqa: PLC0415

        return kernel_calls(self._program, inputs, known, replayed, self._dtype)


@dataclass
class _Bound:
    """A step's memory, and what it does by the counts of a hybrid's tokens."""

    gpu: Gpu
    lower: Callable[[dict[str, Tensor], tuple[int, int]], Calls]
    weights: dict[str, Tensor]
    caches: dict[str, Tensor]
    inputs: dict[str, Both]
    outputs: dict[str, Both]
    most_drafts: int  # of a sequence in a round
    is_recorded: bool  # from the second time on
    _works: dict[tuple[int, int], Callable[[], object]] = field(default_factory=dict)
    _recorded: set[tuple[int, int]] = field(default_factory=set)

    def run(self) -> None:
        self.start()
        self.gpu.wait()

    def start(self) -> None:
        counts = self._counts()
        if counts not in self._works:
            self._works[counts] = self._lowered(counts)
        elif self.is_recorded and counts not in self._recorded:
            # not the first time, when kernels are compiled, which cannot be recorded
            self._works[counts] = self.gpu.record(self._works[counts])
            self._recorded.add(counts)
        self.gpu.follow()
        self.gpu.run(self._works[counts])

    def _lowered(self, counts: tuple[int, int]) -> Callable[[], None]:
        memory = {name: both.memory for name, both in self.inputs.items()} | self.caches
        calls = self.gpu.run(lambda: self.lower(memory, counts))
        values = self.weights | memory
        # no method, which would keep this in a cycle, and with it memory of the GPU
        return partial(_work, self.gpu, calls, values, self.inputs, self.outputs)

    def _counts(self) -> tuple[int, int]:
        """Return known tokens and accepted drafts, on which sizes in a hybrid depend.

        It may be more drafts than were accepted: the step leaves out those of each sequence that
        were not.
        """
        if "known" not in self.inputs:
            return 0, 0
        known, accepted = (self.inputs[name].array for name in ("known", "accepted"))
        return int(known[0]), padded_size(int(accepted.max()), self.most_drafts)


def _work(
    gpu: Gpu,
    calls: Calls,
    values: dict[str, Tensor],
    inputs: dict[str, Both],
    outputs: dict[str, Both],
) -> None:
    for both in inputs.values():
        both.upload(gpu)
    results = calls.run(values)
    for name, both in outputs.items():
        gpu.copy(results[name], both.memory)
        both.download(gpu)

"""The `tensorrt` engine: loads a plan and steps it on an NVIDIA GPU.

Written from TensorRT's documentation and checked against its types; tests use a stand-in of its
runtime. It has never run on a GPU.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from dflash_trt.engines.gpu import Gpu, GpuEngine, Outputs
from dflash_trt.engines.info import read_info
from dflash_trt.engines.step import DeviceStep, Step
from dflash_trt.engines.tensorrt import PLAN_FILE
from dflash_trt.engines.tensorrt.library import check_machine, make_log, sizes, trt
from dflash_trt.errors import EngineError

BOUND_STEPS = 256  # each has an execution context and a CUDA graph


class Engine(GpuEngine):
    visible_step = 256

    def __init__(self, directory: Path, alone: bool = False) -> None:
        info = read_info(directory)
        self._plan = check_machine(info)
        self._gpu = Gpu(0)
        super().__init__(info, BOUND_STEPS, features_stay=not alone)
        self._log, self._messages = make_log()
        self._runtime = trt.Runtime(self._log)
        self._engine = self._load(directory / PLAN_FILE)
        self._check_tensors()
        self._config = self._engine.create_runtime_config()
        # steps run one at a time, so all contexts share one memory
        self._config.set_execution_context_allocation_strategy(
            trt.ExecutionContextAllocationStrategy.USER_MANAGED
        )
        if self._plan.library == "tensorrt_rtx":  # it compiles kernels for new shapes at run time
            self._config.set_runtime_cache(self._config.create_runtime_cache())
        self._scratch = self._gpu.zeros((max(self._engine.device_memory_size_v2, 1),), "uint8")
        self._make_caches()
        self._gpu.wait()

    def _zeros(self, shape: tuple[int, ...]) -> torch.Tensor:
        return self._gpu.zeros(shape, self._plan.dtype)

    def _bind(
        self, first_slot: int, n: int, width: int, visible: int, scored_tokens: int, context: int
    ) -> Step:
        """Bind a step in its own execution context, because a CUDA graph belongs to one."""
        gpu = self._gpu
        inputs, outputs = self._allocate_tensors(n, width, visible, scored_tokens, context)
        bound = {name: both.memory for name, both in {**inputs, **outputs}.items()}
        for name, cache in self._caches.items():
            bound[name] = bound[f"new_{name}"] = cache[first_slot : first_slot + n]
        in_round = max(width, context) <= self.info.most_verified
        logits = outputs.pop("logits").memory

        def work(execution: trt.IExecutionContext) -> None:
            for both in inputs.values():
                both.upload(gpu)
            if not execution.execute_async_v3(gpu.stream):
                raise self._error("a step failed")
            for both in outputs.values():
                both.download(gpu)

        make = partial(self._make_context, 0 if in_round else 1, bound)
        bound_run = _Run(gpu, make, work, is_to_record=in_round)
        arrays = {name: both.array for name, both in inputs.items()}
        on_device = DeviceStep(gpu, logits, bound_run.start)
        return Step(arrays, Outputs(gpu, outputs, logits), bound_run.run, on_device)

    def _make_context(self, profile: int, bound: dict[str, torch.Tensor]) -> trt.IExecutionContext:
        shapes = {name: tuple(memory.shape) for name, memory in bound.items()}
        execution = self._engine.create_execution_context(self._config)
        execution.set_device_memory(self._scratch.data_ptr(), self._scratch.numel())
        fits = execution.set_optimization_profile_async(profile, self._gpu.stream)
        for name in self._plan.inputs:
            fits = fits and execution.set_input_shape(name, shapes[name])
        for name in (*self._plan.inputs, *self._plan.outputs):
            fits = fits and execution.set_tensor_address(name, bound[name].data_ptr())
        for name in self._plan.outputs:
            fits = fits and sizes(execution.get_tensor_shape(name)) == shapes[name]
        if not fits:
            raise self._error(f"a step with {shapes['mask']} of mask does not fit the plan")
        return execution

    def _load(self, path: Path) -> trt.ICudaEngine:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as plan:
            engine = self._runtime.deserialize_cuda_engine(plan)
        if engine is None:
            raise self._error(f"it cannot load {path}")
        return engine

    def _check_tensors(self) -> None:
        """Raise EngineError unless tensors and aliases are those of `engine.json`."""
        engine = self._engine
        plan = self._plan
        names = {engine.get_tensor_name(index) for index in range(engine.num_io_tensors)}
        aliases = {}
        for name in plan.outputs:
            cache = engine.get_aliased_input_tensor(name)
            if cache:
                aliases[name] = cache
        if names != {*plan.inputs, *plan.outputs} or aliases != plan.aliases:
            raise self._error("the plan's tensors are not those of its engine.json")

    def _error(self, what: str) -> EngineError:
        log = f" ({' '.join(self._messages[-2:])})" if self._messages else ""
        return EngineError(f"{self._plan.library}: {what}{log}", "Run `dflash-trt build` again")


@dataclass
class _Run:
    gpu: Gpu
    make_context: Callable[[], trt.IExecutionContext]
    work: Callable[[trt.IExecutionContext], None]
    is_to_record: bool  # as a CUDA graph, on the second run
    context: trt.IExecutionContext | None = None
    go: Callable[[], object] = lambda: None

    def run(self) -> None:
        self.start()
        self.gpu.wait()

    def start(self) -> None:
        if self.context is None:
            self.context = self.make_context()
            self.go = partial(self.work, self.context)
        elif self.is_to_record and _is_capturable(self.context, self.gpu.stream):
            # not the first run, in which TensorRT prepares for the shapes, which cannot be recorded
            self.go = self.gpu.record(self.go)
            self.is_to_record = False
        self.gpu.follow()
        self.go()


def _is_capturable(execution: trt.IExecutionContext, stream: int) -> bool:
    # not while TensorRT-RTX compiles kernels
    is_stream_capturable = getattr(execution, "is_stream_capturable", None)
    return is_stream_capturable is None or bool(is_stream_capturable(stream))

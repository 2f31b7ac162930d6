"""TensorRT's runtime as its documentation says it behaves, over ONNX Runtime.

For the machines without a GPU that the tests run on. Follows the Python API of TensorRT 11 and
TensorRT-RTX 1.7 (IRuntime, ICudaEngine, IExecutionContext): a context is told its memory, its
profile, the shapes of its inputs and the address of each tensor before it runs; what lies outside
of the profile is refused; an aliased output is in the memory of its input. A "plan" is the graph
with its casts, in float16; a "GPU" is this process's memory.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import torch

from dflash_trt.config import TensorRT
from dflash_trt.engines.info import read_info, write_info
from dflash_trt.engines.onnxruntime import use_one_pool
from dflash_trt.engines.tensorrt import PLAN_FILE
from dflash_trt.engines.tensorrt.library import use
from dflash_trt.engines.tensorrt.network import read_operators, to_16_bits
from dflash_trt.engines.tensorrt.plan import describe

__version__ = "1.7.stand-in"
TYPES = {"float16": np.float16, "float": np.float32, "int64": np.int64, "bool": np.bool_}


def make_plan(directory: Path, prefill_chunk: int) -> None:
    use("tensorrt_rtx")
    info, path = read_info(directory), directory / "model.onnx"
    model = read_operators(path)
    to_16_bits(model.graph, ir.DataType.FLOAT16)
    engine = TensorRT(kind="tensorrt", library="tensorrt_rtx", dtype="fp16")
    plan = describe(path, model.graph, info, engine, ("8.9",), prefill_chunk)
    ir.external_data.load_to_model(model)
    model.metadata_props["plan"] = json.dumps(asdict(plan))
    (directory / PLAN_FILE).write_bytes(ir.to_proto(model).SerializeToString())
    write_info(directory, replace(info, kind="tensorrt", plan=plan))
    for name in ("model.onnx", "model.onnx.data"):
        (directory / name).unlink()


class ILogger:
    INFO, VERBOSE = "info", "verbose"


class ExecutionContextAllocationStrategy:
    STATIC, USER_MANAGED = 0, 2


class Runtime:
    def __init__(self, log: ILogger) -> None:
        pass

    def deserialize_cuda_engine(self, plan: Any) -> CudaEngine | None:
        data = bytes(plan)
        return CudaEngine(data) if data else None


class CudaEngine:
    device_memory_size_v2 = 1000

    def __init__(self, data: bytes) -> None:
        options = ort.SessionOptions()
        options.log_severity_level = 3
        use_one_pool(1)
        options.use_per_session_threads = False
        self.session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        self.plan = json.loads(self.session.get_modelmeta().custom_metadata_map["plan"])
        self.inputs = {value.name: value for value in self.session.get_inputs()}
        self.outputs = {value.name: value for value in self.session.get_outputs()}
        self.names = [*self.inputs, *self.outputs]
        self.num_io_tensors = len(self.names)

    def get_tensor_name(self, index: int) -> str:
        return self.names[index]

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return name.removeprefix("new_") if name.startswith("new_") else None

    def create_runtime_config(self) -> RuntimeConfig:
        return RuntimeConfig()

    def create_execution_context(self, config: RuntimeConfig) -> ExecutionContext:
        assert config.strategy == ExecutionContextAllocationStrategy.USER_MANAGED
        return ExecutionContext(self)


class RuntimeConfig:
    strategy = ExecutionContextAllocationStrategy.STATIC

    def set_execution_context_allocation_strategy(self, strategy: int) -> None:
        self.strategy = strategy

    def create_runtime_cache(self) -> str:
        return "cache"

    def set_runtime_cache(self, cache: str) -> None:
        assert cache == "cache"


class ExecutionContext:
    made: ClassVar[list[ExecutionContext]] = []

    def __init__(self, engine: CudaEngine) -> None:
        self._engine = engine
        self._memory = 0
        self.profile: int | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._sizes: dict[str, int] = {}
        self._addresses: dict[str, int] = {}
        self.runs = 0
        ExecutionContext.made.append(self)

    def set_device_memory(self, memory: int, size: int) -> None:
        assert size >= self._engine.device_memory_size_v2
        self._memory = memory

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        assert stream == Memory.stream
        assert not self._shapes  # a switch forgets them
        self.profile = profile
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        bounds = self._engine.plan["profiles"][self.profile]
        _, known = self._engine.plan["inputs"][name]
        for size, axis in zip(shape, known, strict=True):
            if isinstance(axis, int):
                if size != axis:
                    return False
                continue
            least, _, most = bounds[axis]
            if not least <= size <= most or self._sizes.setdefault(axis, size) != size:
                return False
        self._shapes[name] = shape
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        self._addresses[name] = address
        return True

    def get_tensor_shape(self, name: str) -> list[int]:
        _, known = self._engine.plan["outputs"][name]
        return [axis if isinstance(axis, int) else self._sizes[axis] for axis in known]

    def is_stream_capturable(self, stream: int) -> bool:
        return self.runs > 0

    def execute_async_v3(self, stream: int) -> bool:
        engine = self._engine
        assert self._memory
        assert stream == Memory.stream
        assert self._shapes.keys() == engine.inputs.keys()
        assert self._addresses.keys() == {*engine.names}
        for name in engine.outputs:
            cache = engine.get_aliased_input_tensor(name)
            assert cache is None or self._addresses[name] == self._addresses[cache]
        fed = {
            name: self._at(name, value.type, shape)
            for (name, value), shape in zip(
                engine.inputs.items(), map(self._shapes.__getitem__, engine.inputs), strict=True
            )
        }
        found = engine.session.run(list(engine.outputs), fed)
        for (name, value), array in zip(engine.outputs.items(), found, strict=True):
            self._at(name, value.type, tuple(self.get_tensor_shape(name)))[...] = array
        self.runs += 1
        return True

    def _at(self, name: str, type_: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        dtype = np.dtype(TYPES[type_.removeprefix("tensor(").removesuffix(")")])
        size = int(np.prod(shape)) * dtype.itemsize
        assert self._addresses[name]
        memory = (ctypes.c_char * size).from_address(self._addresses[name])
        return np.frombuffer(memory, dtype).reshape(shape)


class Memory:
    """A stand-in of `engines.gpu.Gpu`; a recorded graph repeats its work on the same memory."""

    device, stream = "cpu", 7
    recorded = 0

    def __init__(self, index: int) -> None:
        assert index == 0

    def zeros(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        return torch.zeros(shape, dtype=getattr(torch, dtype))

    pinned_zeros = zeros

    def copy(self, source: torch.Tensor, to: torch.Tensor) -> None:
        to.copy_(source)

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        Memory.recorded += 1
        return work

    def follow(self) -> None:
        pass

    def wait(self) -> None:
        pass

"""The `onnxruntime` engine on an NVIDIA GPU: graph and caches in the CUDA provider.

Tests run it with the CPU provider; on a GPU `tests/gpu` ran once.
"""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime as ort

from dflash_trt.engines.cuda import PROVIDER
from dflash_trt.engines.cuda.kernels import INSTALL, check_placement
from dflash_trt.engines.gpu import Gpu, GpuEngine, Outputs
from dflash_trt.engines.info import read_info
from dflash_trt.engines.onnxruntime import BOUND_STEPS, GRAPH_FILE, load_session
from dflash_trt.engines.step import Step
from dflash_trt.engines.tensorrt.library import compute_capabilities
from dflash_trt.errors import EngineError

if TYPE_CHECKING:
    import torch


class Engine(GpuEngine):
    visible_step = 256

    def __init__(self, directory: Path) -> None:
        info = read_info(directory)
        check_machine()
        super().__init__(info, BOUND_STEPS)
        self._gpu = Gpu(0)
        options = ort.SessionOptions()
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        self._session = load_session(directory, info, options, provider=_provider(self._gpu))
        check_placement(self._session, directory / GRAPH_FILE)
        self._make_caches()
        self._gpu.wait()

    def _zeros(self, shape: tuple[int, ...]) -> torch.Tensor:
        return self._gpu.zeros(shape, "float32")

    def _bind(self, row: int, n: int, width: int, visible: int, scored: int, context: int) -> Step:
        inputs, outputs = self._allocate_tensors(n, width, visible, scored, context)
        caches = {name: cache[row : row + n] for name, cache in self._caches.items()}
        gpu, session, binding = self._gpu, self._session, self._session.io_binding()
        given = {name: memory for name, (_, memory) in inputs.items()} | caches
        taken = {name: memory for name, (_, memory) in outputs.items()}
        taken |= {f"new_{name}": memory for name, memory in caches.items()}
        for bind, tensors in ((binding.bind_input, given), (binding.bind_output, taken)):
            for name, memory in tensors.items():
                dtype = np.dtype(str(memory.dtype).removeprefix("torch.")).type
                bind(name, gpu.device, 0, dtype, [*memory.shape], memory.data_ptr())
        logits = outputs.pop("logits")

        def run(*_: Any) -> None:
            for host, memory in inputs.values():
                gpu.copy(host, memory)
            session.run_with_iobinding(binding)
            for host, memory in outputs.values():
                gpu.copy(memory, host)
            gpu.wait()

        arrays = {name: host.numpy() for name, (host, _) in inputs.items()}
        # keeps the memory alive: the binding has only addresses
        return Step(arrays, Outputs(gpu, outputs, logits), partial(run, given, taken))


def check_machine() -> None:
    """Raise EngineError for what the CUDA provider needs and this machine lacks."""
    if not compute_capabilities():
        raise EngineError(
            "this build runs on an NVIDIA GPU (device: cuda), and here is none with its driver",
            "Run it on a machine with one, or build with engine.device: cpu",
        )
    if PROVIDER not in ort.get_available_providers():
        raise EngineError("the onnxruntime that is installed has no CUDA provider", INSTALL)
    if find_spec("torch") is None:
        raise EngineError(
            "memory on the GPU is PyTorch's, which is not here", "Run: pip install torch"
        )


def _provider(gpu: Gpu) -> tuple[str, dict[str, str]]:
    # the stream of the copies keeps them in order with steps; TF32's products have only 10 bits
    return PROVIDER, {"use_tf32": "0", "user_compute_stream": str(gpu.stream)}

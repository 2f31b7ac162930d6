"""The `onnxruntime` engine: loads an opset-24 graph and steps it, on any CPU."""

import math
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from dflash_trt.engines.info import EngineInfo, read_info
from dflash_trt.engines.step import LoadedEngine, Step, step_tensors
from dflash_trt.errors import EngineError

GRAPH_FILE = "model.onnx"
SPIN = "500"  # microseconds
BOUND_STEPS = 1024  # 16 sequences times 16 tokens times a few lengths: 0.2 ms to bind one
CPU: tuple[str, dict[str, str]] = ("CPUExecutionProvider", {})

Array = npt.NDArray[np.generic]


class Engine(LoadedEngine):
    visible_step = 32

    def __init__(self, directory: Path, *, alone: bool = False) -> None:
        info = read_info(directory)
        super().__init__(info, BOUND_STEPS)
        options = ort.SessionOptions()
        if alone:
            # by default threads spin for 20 ms and more after a step, on the other engine's cores
            options.intra_op_num_threads = info.cpu_threads
            options.add_session_config_entry("session.intra_op.spin_duration_us", SPIN)
        self._session = load_session(directory, info, options)
        self._make_caches()
        if info.quantized and info.role == "target":
            self.least_tokens = least_tokens(self)

    def _zeros(self, shape: tuple[int, ...]) -> Array:
        return np.zeros(shape, np.float32)

    def _copy(self, source: Array, destination: Array) -> None:
        destination[...] = source

    def _bind(
        self, first_slot: int, n: int, width: int, visible: int, scored_tokens: int, context: int
    ) -> Step:
        """Bind buffers of these shapes once: binding costs more than filling small inputs."""
        given, taken = step_tensors(self.info, n, width, visible, scored_tokens, context)
        inputs, outputs = (
            {name: self._shared_buffer(name, *tensor) for name, tensor in tensors.items()}
            for tensors in (given, taken)
        )
        caches = {name: array[first_slot : first_slot + n] for name, array in self._caches.items()}
        values = {
            name: ort.OrtValue.ortvalue_from_numpy(array)
            for name, array in {**inputs, **outputs, **caches}.items()
        }
        values |= {f"new_{name}": values[name] for name in caches}  # in place
        binding = self._session.io_binding()
        for name in (*inputs, *caches):
            binding.bind_ortvalue_input(name, values[name])
        for name in (*outputs, *(f"new_{cache}" for cache in caches)):
            binding.bind_ortvalue_output(name, values[name])
        return Step(inputs, outputs, partial(self._session.run_with_iobinding, binding))

    def _shared_buffer(self, name: str, dtype: type[np.generic], shape: tuple[int, ...]) -> Array:
        whole: Array = self._buffer(name, shape, lambda size: np.empty(size, dtype))
        return whole[: math.prod(shape)].reshape(shape)


_pool_is_set = False  # ONNX Runtime allows sizing it once: the first engine decides


def use_one_pool(threads: int) -> None:
    """Use one thread pool for all sessions, because target and drafter alternate."""
    global _pool_is_set
    if not _pool_is_set:
        ort.set_global_thread_pool_sizes(threads, 1)
        _pool_is_set = True


def load_session(
    directory: Path,
    info: EngineInfo,
    options: ort.SessionOptions,
    provider: tuple[str, dict[str, str]] = CPU,  # name and options
) -> ort.InferenceSession:
    """Load the graph of an engine directory; EngineError if that fails."""
    if not options.intra_op_num_threads:
        use_one_pool(info.cpu_threads)
        options.use_per_session_threads = False
    # planning buffer reuse takes minutes with many experts, and saves no time
    options.enable_mem_reuse = False
    options.log_severity_level = 3
    path = directory / GRAPH_FILE
    try:
        return ort.InferenceSession(path, options, providers=[provider])
    except Exception as error:  # onnxruntime raises unrelated classes
        raise EngineError(
            f"ONNX Runtime cannot load {path}: {error}",
            "The engine directory is damaged or from another version: run `dflash-trt build`.",
        ) from error


def least_tokens(engine: LoadedEngine) -> int:
    """Return how many rows a step needs for logits independent of other sequences, 1 or 2.

    On some CPUs ONNX Runtime has another kernel for one row. Results agree to 1e-5, which quantized
    layers amplify up to 0.5 if an input rounds differently. So a new engine, its cache still empty,
    decodes two tokens together and one by one, and compares bits.
    """
    together = _logits(engine, 0, 2)
    engine.reset_state(0)
    alone = [_logits(engine, place, 1) for place in range(2)]
    return 1 if np.array_equal(together, np.concatenate(alone)) else 2


def _logits(engine: LoadedEngine, place: int, width: int) -> npt.NDArray[np.float32]:
    visible = min(engine.visible_step, engine.info.cache_len)
    step, places = engine.step(0, 1, width, visible, width), place + np.arange(width)
    step.inputs["tokens"][:] = engine.info.vocab_size // (places + 2)
    step.inputs["positions"][:] = places
    step.inputs["write_index"][:] = place
    step.inputs["mask"][:] = np.arange(visible) <= places[:, None]
    step.inputs["scored_tokens"][:] = np.arange(width)
    if engine.info.states is not None:
        step.inputs["known"][:], step.inputs["accepted"][:] = width, 0
    step.run()
    return np.array(step.outputs["logits"], np.float32)

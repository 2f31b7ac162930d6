"""The `onnxruntime` engine: loads an opset-24 graph and steps it, on any CPU."""

import math
import mmap
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from dflash_trt.engines.base import LoadedEngine
from dflash_trt.engines.info import EngineInfo, read_info
from dflash_trt.engines.least_rows import least_rows
from dflash_trt.engines.step import Step, step_tensors
from dflash_trt.errors import EngineError

if TYPE_CHECKING:
    from dflash_trt.engines.ranks import Follower

KIND = "onnxruntime"
GRAPH_FILE, WEIGHTS_FILE = "model.onnx", "model.onnx.data"
SPIN = "500"  # microseconds
BOUND_STEPS = 1024  # 16 sequences, as many tokens of each, a few lengths: 0.2 ms to bind one
CPU: tuple[str, dict[str, str]] = ("CPUExecutionProvider", {})

Array = npt.NDArray[np.generic]


class Engine(LoadedEngine):
    """A loaded graph with its KV caches in float32."""

    visible_step = 32

    def __init__(
        self, directory: Path, follower: "Follower | None" = None, *, alone: bool = False
    ) -> None:
        """follower: of a rank that is not the first; rank 0 starts the others; alone: see
        `load_engine`."""
        info = read_info(directory, KIND)
        leader = None
        if info.ranks > 1 and follower is None:
            # here, because one rank needs none of it, and it takes a while to load
            from dflash_trt.engines.ranks import Leader  # noqa: PLC0415

            leader = Leader(directory, info.ranks)
        super().__init__(info, leader, follower, BOUND_STEPS)
        if self._group is None:
            options = ort.SessionOptions()
            if alone:
                # threads spin for 20 ms after a step and more, on the cores of the other engine
                options.intra_op_num_threads = info.cpu_threads
                options.add_session_config_entry("session.intra_op.spin_duration_us", SPIN)
            self._session = load_session(directory, info, options)
        else:
            from dflash_trt.engines import pieces  # noqa: PLC0415

            load = partial(_load_piece, directory, info)
            cut = pieces.cut(directory / GRAPH_FILE)
            self._pieces = pieces.Pieces(cut, load, self._group.exchange, self._group.check)
        self._make_caches()
        if leader is not None:
            leader.wait_ready()
        if info.quantized and info.role == "target" and follower is None:
            self.least_rows = least_rows(self)

    def _zeros(self, shape: tuple[int, ...]) -> Array:
        return np.zeros(shape, np.float32)

    def _copy(self, source: Array, destination: Array) -> None:
        destination[...] = source

    def _bind(self, row: int, n: int, width: int, visible: int, scored: int, context: int) -> Step:
        """Bind buffers of these shapes once: binding costs more than filling small inputs."""
        given, taken = step_tensors(self.info, n, width, visible, scored, context)
        inputs, outputs = (
            {name: self._shared(name, *tensor) for name, tensor in tensors.items()}
            for tensors in (given, taken)
        )
        caches = {name: array[row : row + n] for name, array in self._caches.items()}
        key = (row, n, width, visible, scored, context)
        return Step(inputs, outputs, self._run_of(key, inputs, outputs, caches))

    def _run_of(
        self,
        key: tuple[int, ...],
        inputs: Mapping[str, Array],
        outputs: Mapping[str, Array],
        caches: Mapping[str, Array],
    ) -> Callable[[], object]:
        """A call of the graph over these arrays; caches in place, as input and output."""
        shared = inputs if self._group is None else self._group.exchange.inputs(inputs)
        values = {
            name: ort.OrtValue.ortvalue_from_numpy(array)
            for name, array in {**shared, **outputs, **caches}.items()
        }
        values |= {f"new_{name}": values[name] for name in caches}
        if self._group is None:
            binding = self._session.io_binding()
            for name in (*inputs, *caches):
                binding.bind_ortvalue_input(name, values[name])
            for name in (*outputs, *(f"new_{cache}" for cache in caches)):
                binding.bind_ortvalue_output(name, values[name])
            return partial(self._session.run_with_iobinding, binding)
        run = self._pieces.bind(values)
        leader = self._leader  # not self: an engine ends with its last user, and its ranks with it
        if leader is None:
            return run

        def lead() -> None:
            for name, array in inputs.items():
                shared[name][...] = array
            leader.run("step", key, run)

        return lead

    def _shared(self, name: str, dtype: type[np.generic], shape: tuple[int, ...]) -> Array:
        whole: Array = self._buffer(name, shape, lambda size: np.empty(size, dtype))
        return whole[: math.prod(shape)].reshape(shape)


_pool_is_set = False


def use_one_pool(threads: int) -> None:
    """One pool for all sessions of a process: target and drafter take turns on the same cores.

    ONNX Runtime lets it be sized once; the first engine of the process decides.
    """
    global _pool_is_set
    if not _pool_is_set:
        ort.set_global_thread_pool_sizes(threads, 1)
        _pool_is_set = True


def load_session(
    directory: Path,
    info: EngineInfo,
    options: ort.SessionOptions,
    piece: bytes | None = None,
    provider: tuple[str, dict[str, str]] = CPU,
) -> ort.InferenceSession:
    """The graph of an engine directory, with its weights; EngineError when it cannot be loaded.

    piece: a part of it as a model, to be loaded in its place. provider: name and options.
    """
    if not options.intra_op_num_threads:
        use_one_pool(info.cpu_threads)
        options.use_per_session_threads = False
    # planning which buffers to share takes minutes for a graph with many experts, and saves no time
    options.enable_mem_reuse = False
    options.log_severity_level = 3
    path = directory / GRAPH_FILE
    try:
        if info.originals:
            # ONNX Runtime follows no link out of the directory, but takes files that are mapped
            names = [WEIGHTS_FILE, *info.originals]
            files = [_mapped(directory / name) for name in names]
            sizes = [len(file) for file in files]
            options.add_external_initializers_from_files_in_memory(names, files, sizes)
        return ort.InferenceSession(piece or path, options, providers=[provider])
    except Exception as error:  # onnxruntime raises its own classes, all unlike each other
        raise EngineError(
            f"ONNX Runtime cannot load {path}: {error}",
            "The engine directory is damaged or from another version: run `dflash-trt build`.",
        ) from error


def _load_piece(directory: Path, info: EngineInfo, piece: bytes) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", str(directory)
    )
    # one arena for all pieces, which run one after the other
    _use_one_arena()
    options.add_session_config_entry("session.use_env_allocators", "1")
    return load_session(directory, info, options, piece)


@lru_cache
def _use_one_arena() -> None:
    memory = ort.OrtMemoryInfo(
        "Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT
    )
    ort.create_and_register_allocator(memory, None)


def _mapped(file: Path) -> mmap.mmap:
    with file.open("rb") as stream:
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)

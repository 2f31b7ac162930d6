"""The `onnxruntime` engine: loads an opset-24 graph and steps it, on any CPU."""

import math
import mmap
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from dflash_trt.engines.info import EngineInfo, read_info
from dflash_trt.engines.step import (
    NOTHING,
    BoundSteps,
    Step,
    cache_names,
    step_tensors,
    token_moves,
)
from dflash_trt.errors import EngineError

if TYPE_CHECKING:
    from dflash_trt.engines.ranks import Follower, Leader

KIND = "onnxruntime"
GRAPH_FILE, WEIGHTS_FILE = "model.onnx", "model.onnx.data"
BOUND_STEPS = 1024  # 16 sequences, as many tokens of each, a few lengths: 0.2 ms to bind one

Array = npt.NDArray[np.generic]


class Engine:
    """A loaded graph with its KV caches in float32; see `engines.step.Engine`."""

    visible_step = 32

    def __init__(self, directory: Path, follower: "Follower | None" = None) -> None:
        """follower: of a rank that is not the first; rank 0 starts the others."""
        self.info = read_info(directory, KIND)
        self._group: Leader | Follower | None = follower
        self._leader: Leader | None = None
        if self.info.ranks == 1:
            self._session = load_session(directory, self.info, ort.SessionOptions())
        else:
            # here, because one rank needs none of it, and it takes a while to load
            from dflash_trt.engines import pieces, ranks  # noqa: PLC0415

            if follower is None:
                self._group = self._leader = ranks.Leader(directory, self.info.ranks)
            assert self._group is not None
            load = partial(_load_piece, directory, self.info)
            cut = pieces.cut(directory / GRAPH_FILE)
            self._pieces = pieces.Pieces(cut, load, self._group.exchange, self._group.check)
        slots, rows = self.info.slots, self.info.cache_len
        self._alike: list[Array] = []  # caches of one shape: [caches, slots, heads, rows, head_dim]
        self._caches: dict[str, Array] = {}
        for (heads, head_dim), names in cache_names(self.info).items():
            alike = np.zeros((len(names), slots, heads, rows, head_dim), np.float32)
            self._alike.append(alike)
            self._caches.update(zip(names, alike, strict=True))
        self._steps = BoundSteps(BOUND_STEPS)
        self._buffers: dict[str, Array] = {}
        if self._leader is not None:
            self._leader.wait_ready()

    def step(
        self, row: int, n: int, width: int, visible: int, scored: int, context: int = 0
    ) -> "Step":
        """See `engines.step.Engine`."""
        return self._steps.of(self._bind, row, n, width, visible, scored, context)

    def move_row(self, source: int, destination: int, tokens: int) -> None:
        """See `engines.step.Engine`."""

        def move() -> None:
            for caches in self._alike:
                moved = caches[:, :, :, :tokens]
                moved[:, destination] = 0 if source == NOTHING else moved[:, source]

        if self._leader is not None:
            self._leader.move_row(source, destination, tokens, move)
        else:
            move()

    def keep_tokens(self, row: int, start: int, kept: Sequence[int]) -> None:
        """See `engines.step.Engine`."""
        moves = token_moves(start, kept)

        def move() -> None:
            for caches in self._alike:
                for source, destination in moves:
                    caches[:, row, :, destination] = caches[:, row, :, source]

        if self._leader is not None and moves:
            self._leader.keep_tokens(row, start, kept, move)
        else:
            move()

    def _bind(
        self, row: int, n: int, width: int, visible: int, scored: int, context: int
    ) -> "Step":
        """Bind buffers of these shapes once: binding costs more than filling small inputs."""
        key = (row, n, width, visible, scored, context)
        given, taken = step_tensors(self.info, n, width, visible, scored, context)
        inputs = {name: self._shared(name, *tensor) for name, tensor in given.items()}
        outputs = {name: self._shared(name, *tensor) for name, tensor in taken.items()}
        caches = {name: array[row : row + n] for name, array in self._caches.items()}
        return Step(inputs, outputs, self._run_of(key, inputs, outputs, caches))

    def _run_of(
        self,
        key: tuple[int, ...],
        inputs: Mapping[str, Array],
        outputs: Mapping[str, Array],
        caches: Mapping[str, Array],
    ) -> Callable[[], object]:
        """A call of the graph over these arrays; caches in place, as input and output."""
        of_numpy = ort.OrtValue.ortvalue_from_numpy
        if self._group is None:
            binding = self._session.io_binding()
            for name, array in inputs.items():
                binding.bind_ortvalue_input(name, of_numpy(array))
            for name, array in outputs.items():
                binding.bind_ortvalue_output(name, of_numpy(array))
            for name, array in caches.items():
                value = of_numpy(array)
                binding.bind_ortvalue_input(name, value)
                binding.bind_ortvalue_output(f"new_{name}", value)
            return partial(self._session.run_with_iobinding, binding)
        shared = self._group.exchange.inputs(inputs)
        values = {name: of_numpy(array) for name, array in {**shared, **outputs, **caches}.items()}
        values |= {f"new_{name}": values[name] for name in caches}
        run = self._pieces.bind(values)
        if self._leader is None:
            return run
        leader, copies = self._leader, [(shared[name], array) for name, array in inputs.items()]

        def lead() -> None:
            for destination, array in copies:
                destination[...] = array
            leader.step(key, run)

        return lead

    def _shared(self, name: str, dtype: type[np.generic], shape: tuple[int, ...]) -> Array:
        """A view of the one buffer that all steps share: a real vocabulary's logits are large, and
        so are a prompt's features, of which there may be a step for each length.
        """
        size = math.prod(shape)
        smaller = self._buffers.get(name)
        if smaller is None or smaller.size < size:
            # twice as much, so that it seldom grows: what is not used takes addresses alone
            self._buffers[name] = np.empty(size if smaller is None else 2 * size, dtype)
            self._steps.clear()  # they hold on to the smaller one
        return self._buffers[name][:size].reshape(shape)


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
    directory: Path, info: EngineInfo, options: ort.SessionOptions, piece: bytes | None = None
) -> ort.InferenceSession:
    """The graph of an engine directory, with its weights; EngineError when it cannot be loaded.

    piece: a part of it as a model, to be loaded in its place.
    """
    use_one_pool(info.threads)
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
        return ort.InferenceSession(piece or path, options, providers=["CPUExecutionProvider"])
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

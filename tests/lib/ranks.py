"""The graphs of all ranks of an engine in one process: run in turn, their pieces added with numpy.

A rank's graph is cut at its collectives, and ONNX Runtime runs each piece as a session of its own.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort

from dflash_trt.engines.info import rank_directory, read_info
from dflash_trt.engines.onnxruntime import use_one_pool
from dflash_trt.engines.step import LoadedEngine, Step, step_tensors

COLLECTIVE = "DistCollective"
FOLDER = "session.model_external_initializers_file_folder_path"
Array = npt.NDArray[Any]


class Piece(NamedTuple):
    """Nodes between two collectives, and the one that follows."""

    session: ort.InferenceSession
    inputs: list[str]
    outputs: list[str]
    # "all_reduce" or "all_gather", the value that goes in and the one that comes out
    collective: tuple[str, str, str] | None


class Rank(LoadedEngine):
    """One rank's caches and the pieces of its graph; `Ranks` steps them."""

    def __init__(self, directory: Path) -> None:
        super().__init__(read_info(directory), 0)
        self.pieces = cut(directory / "model.onnx")
        self._make_caches()

    def _zeros(self, shape: tuple[int, ...]) -> Array:
        return np.zeros(shape, np.float32)

    def _copy(self, source: Array, destination: Array) -> None:
        destination[...] = source

    def _bind(self, row: int, n: int, width: int, visible: int, scored: int, context: int) -> Step:
        raise NotImplementedError

    def caches(self, row: int, n: int) -> dict[str, Array]:
        return {name: cache[row : row + n] for name, cache in self._caches.items()}


class Ranks:
    """An `Engine` over the ranks' engines below the directory of rank 0."""

    visible_step, least_rows = 32, 1

    def __init__(self, directory: Path) -> None:
        self.info = read_info(directory)
        self._ranks = [Rank(rank_directory(directory, i)) for i in range(self.info.ranks)]

    def step(
        self, row: int, n: int, width: int, visible: int, scored: int, context: int = 0
    ) -> Step:
        inputs, outputs = (
            {name: np.zeros(shape, dtype) for name, (dtype, shape) in tensors.items()}
            for tensors in step_tensors(self.info, n, width, visible, scored, context)
        )
        return Step(inputs, outputs, lambda: self._run(row, n, inputs, outputs))

    def copy_kv(self, source: int, destination: int, tokens: int, start: int = 0) -> None:
        for rank in self._ranks:
            rank.copy_kv(source, destination, tokens, start)

    def _run(self, row: int, n: int, inputs: dict[str, Array], outputs: dict[str, Array]) -> None:
        caches = [rank.caches(row, n) for rank in self._ranks]
        values: list[dict[str, Array]] = [{**inputs, **own} for own in caches]
        for pieces in zip(*(rank.pieces for rank in self._ranks), strict=True):
            for piece, known in zip(pieces, values, strict=True):
                given = {name: known[name] for name in piece.inputs}
                if piece.outputs:
                    made = piece.session.run(piece.outputs, given)
                    known.update(zip(piece.outputs, made, strict=True))
            if pieces[0].collective is None:
                continue
            kind, taken, result = pieces[0].collective
            shares = [known[taken] for known in values]
            whole = np.concatenate(shares) if kind == "all_gather" else np.sum(shares, axis=0)
            for known in values:
                known[result] = whole
        for own, known in zip(caches, values, strict=True):
            for name, cache in own.items():
                cache[...] = known[f"new_{name}"]
        for name, array in outputs.items():
            array[...] = values[0][name]


def cut(path: Path) -> list[Piece]:
    """Return the pieces of a graph file, in order; weights stay in the files of the whole one."""
    model = onnx.load(path, load_external_data=False)
    graph = onnx.shape_inference.infer_shapes(model).graph  # pieces must say their inputs' types
    types = {v.name: v for v in (*graph.input, *graph.output, *graph.value_info)}
    weights = {weight.name: weight for weight in graph.initializer}
    groups: list[list[onnx.NodeProto]] = [[]]
    collectives: list[onnx.NodeProto] = []
    for node in graph.node:
        if node.op_type == COLLECTIVE:
            collectives.append(node)
            groups.append([])
        else:
            groups[-1].append(node)
    options = ort.SessionOptions()
    use_one_pool(1)  # where an engine has not set it
    options.use_per_session_threads = False
    options.add_session_config_entry(FOLDER, str(path.parent))
    wanted = {value.name for value in graph.output}  # of what comes after a piece
    pieces: list[Piece] = []
    for index in reversed(range(len(groups))):
        nodes, after = groups[index], collectives[index : index + 1]
        wanted.update(name for node in after for name in node.input)
        made = [name for node in nodes for name in node.output]
        used = dict.fromkeys(name for node in nodes for name in node.input if name)
        inputs = [name for name in used if name not in weights and name not in set(made)]
        outputs = [name for name in made if name in wanted]
        piece = onnx.ModelProto(
            ir_version=model.ir_version,
            opset_import=[opset for opset in model.opset_import if not opset.domain],
            graph=onnx.GraphProto(
                name=f"{graph.name}_{index}",
                node=nodes,
                input=[types[name] for name in inputs],
                output=[types[name] for name in outputs],
                initializer=[weights[name] for name in used if name in weights],
            ),
        )
        collective = None
        if after:
            named = {attribute.name: attribute.s.decode() for attribute in after[0].attribute}
            collective = named["collective_operation"], after[0].input[0], after[0].output[0]
        wanted.update(inputs)
        session = ort.InferenceSession(piece.SerializeToString(), options)
        pieces.insert(0, Piece(session, inputs, outputs, collective))
    return pieces

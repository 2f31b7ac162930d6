"""A rank's graph on the CPU: cut at its collectives, and run piece by piece.

The file that is cut is the one that TensorRT builds a plan from. ONNX Runtime runs each piece as a
session of its own; what a later piece takes of an earlier one lies in buffers that are bound once.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort

from dflash_trt.engines.exchange import LAST, Check, Exchange

COLLECTIVE = "DistCollective"
Call = Callable[[], object]
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Piece:
    """Nodes between two collectives as a model; its weights stay in the files of the whole one."""

    model: bytes
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    # what follows: "all_reduce" or "all_gather", the value that goes in and the one that comes out
    collective: tuple[str, str, str] | None


def cut(path: Path) -> list[Piece]:
    """The pieces of a graph file, in order."""
    model = onnx.load(path, load_external_data=False)
    graph = onnx.shape_inference.infer_shapes(model).graph  # pieces must say their inputs' types
    values = {v.name: v for v in (*graph.input, *graph.output, *graph.value_info)}
    weights = {weight.name: weight for weight in graph.initializer}
    groups: list[list[onnx.NodeProto]] = [[]]
    collectives: list[onnx.NodeProto] = []
    for node in graph.node:
        if node.op_type == COLLECTIVE:
            collectives.append(node)
            groups.append([])
        else:
            groups[-1].append(node)
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
                input=[values[name] for name in inputs],
                output=[values[name] for name in outputs],
                initializer=[weights[name] for name in used if name in weights],
            ),
        )
        collective = None
        if after:
            named = {attribute.name: attribute.s.decode() for attribute in after[0].attribute}
            collective = named["collective_operation"], after[0].input[0], after[0].output[0]
        wanted.update(inputs)
        found = Piece(piece.SerializeToString(), tuple(inputs), tuple(outputs), collective)
        pieces.insert(0, found)
    return pieces


class Pieces:
    """The loaded pieces of one rank."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        load: Callable[[bytes], Any],
        exchange: Exchange,
        check: Check,
    ) -> None:
        """load: makes a session; check: see `Exchange.wait`."""
        # what comes after the last collective is the same on all ranks: one runs it
        self._pieces = [p for p in pieces if p.collective is not None or exchange.rank == 0]
        self._sessions = [load(piece.model) for piece in self._pieces]
        self._exchange, self._check = exchange, check
        self._last = len(pieces) - 2  # whose collective is the last one
        self._places = _places(self._pieces)
        self._buffers: dict[int, npt.NDArray[np.uint8]] = {}

    def bind(self, values: Mapping[str, ort.OrtValue]) -> Call:
        """A step over the graph's inputs and outputs, by name."""
        calls: list[Call] = []

        def run() -> None:
            if calls:
                for call in calls:
                    call()
            else:  # the first time finds out the shapes of what is between the pieces
                calls.extend(self._run_first(dict(values)))

        return run

    def _run_first(self, values: dict[str, ort.OrtValue]) -> list[Call]:
        calls: list[Call] = []
        for index, (piece, session) in enumerate(zip(self._pieces, self._sessions, strict=True)):
            operation, going_in, coming_out = piece.collective or ("", "", "")
            wanted = {*values, *self._places, going_in}
            outputs = [name for name in piece.outputs if name in wanted]
            binding = session.io_binding()
            for name in piece.inputs:
                binding.bind_ortvalue_input(name, values[name])
            for name in outputs:
                if name in values:
                    binding.bind_ortvalue_output(name, values[name])
                else:
                    binding.bind_output(name)
            session.run_with_iobinding(binding)
            for name, found in zip(outputs, binding.get_outputs(), strict=True):
                if name in values:
                    continue
                array = found.numpy()
                if name == going_in:
                    slots = self._exchange.slots(
                        LAST if index == self._last else index % 2, array.shape
                    )
                    kept = slots[self._exchange.rank]
                else:
                    kept = self._keep(name, array.shape, array.dtype)
                kept[...] = array
                values[name] = ort.OrtValue.ortvalue_from_numpy(kept)
                binding.bind_ortvalue_output(name, values[name])
            calls.append(partial(session.run_with_iobinding, binding))
            if piece.collective is None:
                continue
            if index == self._last and self._exchange.rank:
                calls.append(partial(self._exchange.tell, [0]))
            else:
                shape = slots[0].shape
                if operation == "all_gather":
                    shape = (len(slots) * shape[0], *shape[1:])
                result = self._keep(coming_out, shape, slots[0].dtype)
                values[coming_out] = ort.OrtValue.ortvalue_from_numpy(result)
                calls.append(partial(self._meet, operation, index == self._last, slots, result))
            calls[-1]()
        return calls

    def _meet(self, operation: str, last: bool, slots: Sequence[Array], result: Array) -> None:
        """What all ranks do together: in the same order on each, so that all get the same bits."""
        if last:
            self._exchange.wait(self._exchange.others, self._check)
        else:
            self._exchange.meet(self._check)
        if operation == "all_gather":
            np.concatenate(slots, out=result)
            return
        np.add(slots[0], slots[1], out=result)
        for slot in slots[2:]:
            np.add(result, slot, out=result)

    def _keep(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Where a value lies until it was used, in a buffer that all steps share."""
        place, size = self._places[name], math.prod(shape) * dtype.itemsize
        if place not in self._buffers or self._buffers[place].size < size:
            self._buffers[place] = np.empty(size, np.uint8)
        return self._buffers[place][:size].view(dtype).reshape(shape)


def _places(pieces: Sequence[Piece]) -> dict[str, int]:
    """Which buffer has a value that goes from one piece to later ones; they are used again."""
    last = {name: index for index, piece in enumerate(pieces) for name in piece.inputs}
    places: dict[str, int] = {}
    busy: list[int] = []  # the last piece that takes what is in a buffer
    for index, piece in enumerate(pieces):
        for name in (*piece.outputs, *(piece.collective or ())[2:]):
            if name not in last:
                continue
            free = [place for place, until in enumerate(busy) if until < index]
            places[name] = free[0] if free else len(busy)
            busy[places[name] : places[name] + 1] = [last[name]]
    return places

"""A thin builder over onnx-ir: nodes in memory, weights on disk until the graph is saved."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx_ir.tape import Tape

from dflash_trt.checkpoints.weights import Weights
from dflash_trt.graphs.quantised import BLOCK, codes, scales
from dflash_trt.graphs.sharding import ALONE, Rank

OPSET = 24  # Attention, RMSNormalization, RotaryEmbedding and TensorScatter in one standard opset
IR_VERSION = 11  # ONNX Runtime 1.31 reads IR versions up to 13
WEIGHTS_FILE = "model.onnx.data"
DTYPES = {"BF16": ir.DataType.BFLOAT16, "F16": ir.DataType.FLOAT16, "F32": ir.DataType.FLOAT}
ROWS, COLUMNS = 512, 128  # transposed at a time: what stays in a core's cache
WORKERS = min(4, os.cpu_count() or 1)
IN_FLIGHT = 1 << 28  # bytes of tensors in memory at a time, beside one that is larger
INSIDE = 256  # bytes of a tensor that stays in model.onnx
COLLECTIVES = "ai.onnx.contrib"  # TensorRT takes DistCollective in any domain
Kind = Literal["onnxruntime", "tensorrt"]
Bits = Literal[4, 8]


@dataclass(frozen=True)
class Storage:
    """How weights lie on disk.

    link: what the graph can take from the checkpoint as it lies there is not copied. bits: of
    linear layers, in blocks of 32 (`quantised.py`); None: the checkpoint's own dtype.
    """

    link: bool = False
    bits: Bits | None = None


COPIED = Storage()


class GraphBuilder:
    """Collects one ONNX graph that computes in float32; weights are read when it is saved.

    kind: of the engine it is for, where one form does not serve both well (see `moe.py`); rank:
    whose graph it is, where several compute the model together (see `sharding.py`).
    `links` are the original files that a graph with links needs, and their names beside it.
    """

    def __init__(
        self,
        name: str,
        kind: Kind = "onnxruntime",
        storage: Storage = COPIED,
        rank: Rank = ALONE,
    ) -> None:
        self.kind = kind
        self.rank = rank
        self.links: dict[Path, str] = {}
        self.storage = storage
        self._matrices: dict[tuple[Path, str], ir.Value] = {}
        opsets = {"": OPSET} if rank.of == 1 else {"": OPSET, COLLECTIVES: 1}
        self._graph = ir.Graph((), (), nodes=(), opset_imports=opsets, name=name)
        self._tape = Tape(self._graph)
        self._constants: dict[tuple[int, ...], ir.Value] = {}
        self._numbers: dict[float, ir.Value] = {}

    def input(self, name: str, dtype: ir.DataType, shape: Sequence[int | str]) -> ir.Value:
        """Add a graph input; a string in `shape` names a dynamic dimension."""
        value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
        self._graph.inputs.append(value)
        return value

    def output(
        self, value: ir.Value, name: str, dtype: ir.DataType, shape: Sequence[int | str]
    ) -> None:
        """Make `value` a graph output under `name`."""
        value.name, value.type, value.shape = name, ir.TensorType(dtype), ir.Shape(shape)
        self._graph.outputs.append(value)

    def op(
        self, op_type: str, *inputs: ir.Value, **attributes: int | float | str | Sequence[int]
    ) -> ir.Value:
        """Add a node of the standard domain with one output."""
        return self._tape.op(op_type, inputs, attributes)

    def ops(
        self, op_type: str, *inputs: ir.Value, outputs: int, **attributes: int | float | str
    ) -> Sequence[ir.Value]:
        """Add a node of the standard domain with several outputs."""
        return self._tape.op_multi_out(op_type, inputs, attributes, num_outputs=outputs)

    def collective(self, x: ir.Value, operation: str, reduce_op: str) -> ir.Value:
        """Add what all ranks do together with float32 `x` (TensorRT's DistCollective)."""
        attributes: dict[str, int | str] = {
            "collective_operation": operation,
            "reduce_op": reduce_op,
            "nb_rank": self.rank.of,
            "root": -1,
        }
        out = self._tape.op("DistCollective", (x,), attributes, domain=COLLECTIVES)
        out.type = ir.TensorType(ir.DataType.FLOAT)  # no schema says so
        return out

    def split(self, value: ir.Value, sizes: Sequence[int], axis: int) -> Sequence[ir.Value]:
        """Split `value` along `axis` into parts of the given sizes."""
        return self.ops("Split", value, self.ints(*sizes), outputs=len(sizes), axis=axis)

    def ints(self, *values: int) -> ir.Value:
        """A 1-D int64 constant, shared by all its users."""
        if values not in self._constants:
            name = "ints_" + "_".join(map(str, values))
            self._constants[values] = self.constant(name, np.array(values, np.int64))
        return self._constants[values]

    def number(self, value: float) -> ir.Value:
        """A float32 constant `[1]`, shared by all its users."""
        if value not in self._numbers:
            self._numbers[value] = self.constant(f"float_{value}", np.array([value], np.float32))
        return self._numbers[value]

    def constant(self, name: str, array: npt.NDArray[np.generic]) -> ir.Value:
        """An initializer that is held in memory: for tables and shapes."""
        return self._tape.initializer(ir.tensor(array, name=name))

    def vector(self, weights: Weights, name: str, plus: float = 0.0) -> ir.Value:
        """A checkpoint tensor in float32 (norm weights), or with a number added."""
        return self.lazy(name, weights.shape(name), lambda: _float32(weights, name) + plus)

    def matrix(self, weights: Weights, name: str) -> ir.Value:
        """A checkpoint tensor in its own dtype: rows are gathered from it, or see `float32`."""
        key = (weights.directory, name)
        if key not in self._matrices:  # one table may be embedding and head
            self._matrices[key] = self._matrix(weights, name)
        return self._matrices[key]

    def _matrix(self, weights: Weights, name: str) -> ir.Value:
        dtype, shape = DTYPES[weights.dtype(name)], weights.shape(name)
        place = weights.place(name)
        if not self.storage.link or place is None:
            return self.lazy(name, shape, lambda: weights.read(name), dtype)
        file, offset = place
        location = self.links.setdefault(file, f"original-{len(self.links)}{file.suffix}")
        length = math.prod(shape) * dtype.itemsize
        tensor = ir.ExternalTensor(
            location, offset, int(length), dtype, shape=ir.Shape(shape), name=name
        )
        return self._tape.initializer(tensor)

    def float32(self, value: ir.Value, dtype: ir.DataType | None) -> ir.Value:
        """`value`, which is of `dtype`, in float32; of a weight it is folded as the graph loads."""
        if dtype == ir.DataType.FLOAT:
            return value
        return self.op("Cast", value, to=ir.DataType.FLOAT)

    def head(self, weights: Weights, name: str) -> ir.Value:
        """An output head `[vocab, hidden]` as MatMul operand; often it is the embedding, too.

        Quantised to int8 even where other layers are int4: on the demo pair int8 here adds nothing
        to their error (5.3 % rms), and int4 a seventh of it.
        """
        if self.storage.bits and weights.shape(name)[1] % BLOCK == 0:
            return self._quantised(weights, (name,), f"{name}.head", 8)
        table = self.matrix(weights, name)
        return self.op("Transpose", self.float32(table, table.dtype), perm=(1, 0))

    def linear(self, weights: Weights, *names: str, exact: bool = False) -> ir.Value:
        """Linear layers `[out, in]` side by side, as one MatMul operand `[in, sum of outs]`.

        They are written transposed, in the checkpoint's dtype: a session then loads in the time
        and memory of float32. Linked ones are put together by the session. exact: not quantised.
        """
        shape = _side_by_side(weights, names)
        if self.storage.bits and not exact and shape[0] % BLOCK == 0:
            return self._quantised(weights, names, "|".join(names), self.storage.bits)
        dtypes = {weights.dtype(name) for name in names}
        dtype = DTYPES[dtypes.pop()] if len(dtypes) == 1 else ir.DataType.FLOAT
        if self.storage.link and not dtypes and all(weights.place(name) for name in names):
            parts = [self.matrix(weights, name) for name in names]
            stored = parts[0] if len(parts) == 1 else self.op("Concat", *parts, axis=0)
            return self.op("Transpose", self.float32(stored, dtype), perm=(1, 0))

        def read() -> npt.NDArray[np.generic]:
            fused, column = np.empty(shape, dtype.numpy()), 0
            for rows in _pieces(weights, names):
                _transpose(rows, fused[:, column : column + len(rows)])
                column += len(rows)
            return fused

        return self.float32(self.lazy("|".join(names), shape, read, dtype), dtype)

    def _quantised(self, weights: Weights, names: Sequence[str], as_: str, bits: Bits) -> ir.Value:
        shape = _side_by_side(weights, names)

        def pieces() -> Iterator[npt.NDArray[np.float32]]:
            return (rows.astype(np.float32) for rows in _pieces(weights, names))

        dtype = ir.DataType.INT8 if bits == 8 else ir.DataType.INT4
        stored = self.lazy(as_, shape, lambda: codes(pieces(), shape, bits), dtype)
        blocks = (shape[0] // BLOCK, shape[1])
        scale = self.lazy(
            f"{names[0]}.{bits}_bit_scale", blocks, lambda: scales(pieces(), shape, bits)
        )
        return self.op("DequantizeLinear", stored, scale, axis=0, block_size=BLOCK)

    def bias(self, weights: Weights, *names: str) -> ir.Value:
        """Biases side by side, in the order of `linear`."""
        shape = (sum(weights.shape(name)[0] for name in names),)
        return self.lazy(
            "|".join(names),
            shape,
            lambda: np.concatenate([_float32(weights, name) for name in names]),
        )

    def save(self, directory: Path, progress: Callable[[str], None]) -> None:
        """Write `model.onnx`, its external data and links to the originals it points into.

        A few tensors are in memory at a time (`IN_FLIGHT`). `progress` is called with each name.
        """
        model = ir.Model(self._graph, ir_version=IR_VERSION, producer_name="dflash-trt")
        values = [v for graph in model.graphs() for v in graph.initializers.values()]
        ours = []
        for value in values:
            tensor = value.const_value
            assert tensor is not None
            if isinstance(tensor, ir.ExternalTensor):
                progress(tensor.name or "")
            elif tensor.nbytes > INSIDE:
                ours.append((value, tensor))
        # aligned, because dtypes of several sizes lie behind each other
        written = ir.external_data.convert_tensors_to_external(
            [tensor for _, tensor in ours],
            directory,
            WEIGHTS_FILE,
            callback=lambda tensor, _: progress(tensor.name or ""),
            max_workers=WORKERS,
            max_in_flight_bytes=IN_FLIGHT,
            alignment=4096,
            align_threshold=0,
        )
        for (value, _), external in zip(ours, written, strict=True):
            value.const_value = external
        for file, name in self.links.items():
            (directory / name).symlink_to(file.resolve())
        ir.save(model, directory / "model.onnx")

    def lazy(
        self,
        name: str,
        shape: tuple[int, ...],
        read: Callable[[], npt.NDArray[np.generic]],
        dtype: ir.DataType = ir.DataType.FLOAT,
    ) -> ir.Value:
        """A weight that is read when the graph is saved."""
        tensor = ir.LazyTensor(lambda: ir.tensor(read()), dtype, ir.Shape(shape), name=name)
        return self._tape.initializer(tensor)


def _side_by_side(weights: Weights, names: Sequence[str]) -> tuple[int, int]:
    """The shape `[in, sum of outs]` of linear layers as one MatMul operand."""
    return weights.shape(names[0])[1], sum(weights.shape(name)[0] for name in names)


def _pieces(weights: Weights, names: Sequence[str]) -> Iterator[npt.NDArray[np.generic]]:
    """Their rows in order, `ROWS` at most at a time."""
    for name in names:
        yield from weights.pieces(name, ROWS)


def _transpose(rows: npt.NDArray[np.generic], into: npt.NDArray[np.generic]) -> None:
    if rows.dtype.itemsize == into.dtype.itemsize == 2:
        rows, into = rows.view(np.uint16), into.view(np.uint16)  # numpy is slow on a foreign dtype
    # through tiles with a pad: at a power of two apart, values would share a line of the cache
    pad = 64 // into.dtype.itemsize
    tile = np.empty((len(rows), COLUMNS + pad), into.dtype)
    for start in range(0, rows.shape[1], COLUMNS):
        part = rows[:, start : start + COLUMNS]
        tile[:, : part.shape[1]] = part
        into[start : start + COLUMNS] = tile[:, : part.shape[1]].T


def _float32(weights: Weights, name: str) -> npt.NDArray[np.float32]:
    return weights.read(name).astype(np.float32)

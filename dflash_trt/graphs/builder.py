"""A thin builder over onnx-ir: nodes in memory, weights on disk until the graph is saved."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx_ir.tape import Tape

from dflash_trt.checkpoints.weights import Weights

OPSET = 24  # Attention, RMSNormalization, RotaryEmbedding and TensorScatter in one standard opset
IR_VERSION = 11  # ONNX Runtime 1.31 reads IR versions up to 13
WEIGHTS_FILE = "model.onnx.data"
Kind = Literal["onnxruntime", "tensorrt"]


class GraphBuilder:
    """Collects one ONNX graph; every weight is float32 and read when the graph is saved.

    kind: of the engine it is for, where one form does not serve both well (see `moe.py`).
    """

    def __init__(self, name: str, kind: Kind = "onnxruntime") -> None:
        self.kind = kind
        self._graph = ir.Graph((), (), nodes=(), opset_imports={"": OPSET}, name=name)
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
        """A checkpoint tensor as it is (norm weights, embeddings), or with a number added."""
        return self.lazy(name, weights.shape(name), lambda: _float32(weights, name) + plus)

    def linear(self, weights: Weights, *names: str) -> ir.Value:
        """Linear layers `[out, in]` side by side, as one MatMul operand `[in, sum of outs]`."""
        rows = [weights.shape(name)[0] for name in names]
        shape = (weights.shape(names[0])[1], sum(rows))

        def read() -> npt.NDArray[np.float32]:
            fused = np.empty(shape, np.float32)
            for name, start, count in zip(names, np.cumsum([0, *rows]), rows, strict=False):
                fused[:, start : start + count] = weights.read(name).T
            return fused

        return self.lazy("|".join(names), shape, read)

    def bias(self, weights: Weights, *names: str) -> ir.Value:
        """Biases side by side, in the order of `linear`."""
        shape = (sum(weights.shape(name)[0] for name in names),)
        return self.lazy(
            "|".join(names),
            shape,
            lambda: np.concatenate([_float32(weights, name) for name in names]),
        )

    def save(self, directory: Path, progress: Callable[[str], None]) -> None:
        """Write `model.onnx` and its external data, one tensor in memory at a time."""
        model = ir.Model(self._graph, ir_version=IR_VERSION, producer_name="dflash-trt")
        ir.save(
            model,
            directory / "model.onnx",
            external_data=WEIGHTS_FILE,
            callback=lambda tensor, _: progress(tensor.name or ""),
        )

    def lazy(
        self, name: str, shape: tuple[int, ...], read: Callable[[], npt.NDArray[np.float32]]
    ) -> ir.Value:
        """A weight that is read when the graph is saved."""
        tensor = ir.LazyTensor(
            lambda: ir.tensor(read()), ir.DataType.FLOAT, ir.Shape(shape), name=name
        )
        return self._tape.initializer(tensor)


def _float32(weights: Weights, name: str) -> npt.NDArray[np.float32]:
    return weights.read(name).astype(np.float32)

"""Builder of ONNX graphs over onnx-ir: weights stay on disk until the graph is saved."""

import math
import os
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from itertools import chain, cycle
from pathlib import Path
from threading import Lock
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx_ir.tape import Tape

from dflash_trt.checkpoints import DecoderSpec
from dflash_trt.config import COPIED, Bits, Storage
from dflash_trt.engine_kinds import GraphKind, graph_facts
from dflash_trt.files import Entry, digest_for
from dflash_trt.graphs.quantized import (
    BLOCK,
    Floats,
    PackedRows,
    Rows,
    ScaledColumns,
    join_rows,
    pack_rows,
    quantize_rows,
    quantize_to_7_bits,
    quantize_to_fp8,
)
from dflash_trt.weights import Form, Span, Weights

ALIGNMENT = 4096  # bytes: memory-mapped tensors begin on a page
CHUNK = 1 << 19  # bytes per copy
BUFFERS = 12  # copies in flight
WRITERS = 4  # threads: one alone is slower at handing data to the kernel
FLUSH = 1 << 26  # bytes after which the disk starts writing
WORKERS = min(4, os.cpu_count() or 1)
IN_FLIGHT = 1 << 28  # bytes of computed tensors in memory, plus one larger tensor
OPSET = 24  # Attention, RMSNormalization, RotaryEmbedding and TensorScatter in one standard opset
HYBRID_OPSET = 27  # and LinearAttention
MICROSOFT = "com.microsoft"  # domain of ONNX Runtime's own operators
PART_DOMAIN = "dflash"  # domain of a graph's parts
INT8_INPUTS = 4  # accuracy level of products: inputs are rounded to int8, a scale for each block
IR_VERSION = 11  # ONNX Runtime 1.31 reads IR versions up to 13
WEIGHTS_FILE = "model.onnx.data"
DTYPES = {"BF16": ir.DataType.BFLOAT16, "F16": ir.DataType.FLOAT16, "F32": ir.DataType.FLOAT}
FP8 = ir.DataType.FLOAT8E4M3FN
FP8_BLOCKS = (128, 256)  # inputs that may share a scale; kernels cut products at multiples of both
ROWS = 512  # quantized at a time: fits a core's cache
ZERO = 128  # of int8 inputs, stored as uint8
INSIDE = 256  # largest tensor in bytes that stays in model.onnx
Compute = Callable[[], npt.NDArray[np.generic]]
Build = Callable[[], ir.Value]
Body = Callable[..., ir.Value | Sequence[ir.Value]]  # of a part
Attribute = int | float | str | Sequence[int]
T = TypeVar("T")
P = TypeVar("P", bound=npt.NDArray[np.generic])


class PlacedTensor(NamedTuple):
    name: str
    offset: int  # in the data file
    size: int  # bytes
    source: Sequence[Span] | Compute


class Chunk(NamedTuple):
    """A chunk that is being hashed and written."""

    size: int
    hashed: Future[object]
    written: Future[None]


class Computed(NamedTuple):
    size: int
    data: Future[npt.NDArray[np.uint8]]


class DataFile:
    """Tensors of a data file; `write` copies those stored in files and computes the others."""

    def __init__(self) -> None:
        self._size = 0
        self._tensors: list[PlacedTensor] = []

    def add(self, name: str, size: int, source: Sequence[Span] | Compute) -> int:
        """Add a tensor of `size` bytes; return its offset in the file."""
        offset = self._size + -self._size % ALIGNMENT
        self._tensors.append(PlacedTensor(name, offset, size, source))
        self._size = offset + size
        return offset

    def write(self, file: Path, progress: Callable[[str], None]) -> Entry:
        """Write the file; call `progress` with each name. Returns its manifest entry."""
        kind, digest = digest_for(self._size)
        with (
            file.open("wb", buffering=0) as stream,
            ThreadPoolExecutor(1) as hasher,  # in order
            ThreadPoolExecutor(WRITERS) as writers,
        ):
            descriptor = stream.fileno()
            waiting: deque[Chunk] = deque()
            end = 0
            finished = 0
            flushed = 0
            for data in chain(self._chunks(progress), [None]):
                if data is not None:
                    hashed = hasher.submit(digest.update, data)
                    written = writers.submit(_write, descriptor, data, end)
                    waiting.append(Chunk(len(data), hashed, written))
                    end += len(data)
                while waiting and (
                    data is None or len(waiting) >= BUFFERS or end - finished > IN_FLIGHT
                ):
                    chunk = waiting.popleft()
                    chunk.hashed.result()
                    chunk.written.result()
                    finished += chunk.size
                if finished - flushed >= FLUSH:
                    # for its side effect: the disk begins to write without anyone waiting
                    size = finished - flushed
                    os.posix_fadvise(descriptor, flushed, size, os.POSIX_FADV_DONTNEED)
                    flushed = finished
            assert end == self._size
        return {kind: digest.hexdigest(), "size": self._size}

    def _chunks(self, progress: Callable[[str], None]) -> Iterator[memoryview]:
        """Yield all bytes in order; a chunk is valid until `BUFFERS - 1` more are yielded."""
        buffers = cycle([memoryview(bytearray(CHUNK)) for _ in range(BUFFERS)])
        end = 0
        with ThreadPoolExecutor(WORKERS) as pool:
            computed = self._compute_ahead(pool)
            for tensor in self._tensors:
                if tensor.offset > end:
                    yield memoryview(bytes(tensor.offset - end))
                if callable(tensor.source):
                    yield next(computed).data
                else:
                    for span in tensor.source:
                        yield from span.read(buffers)
                end = tensor.offset + tensor.size
                progress(tensor.name)

    def _compute_ahead(self, pool: ThreadPoolExecutor) -> Iterator[npt.NDArray[np.uint8]]:
        waiting: deque[Computed] = deque()
        for tensor in self._tensors:
            if not callable(tensor.source):
                continue
            room = IN_FLIGHT - tensor.size
            while waiting and (
                len(waiting) >= 2 * WORKERS or sum(ahead.size for ahead in waiting) > room
            ):
                yield waiting.popleft().data.result()
            waiting.append(Computed(tensor.size, pool.submit(_bytes, tensor.source)))
        for ahead in waiting:
            yield ahead.data.result()


def _write(file: int, data: memoryview, offset: int) -> None:
    while data:  # one call writes less than 2 GiB
        size = os.pwrite(file, data, offset)
        data = data[size:]
        offset += size


def _bytes(compute: Compute) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(compute()).reshape(-1).view(np.uint8)


class BlockForm(NamedTuple):
    """How a matrix is kept in blocks."""

    form: Form
    copied: bool  # from the checkpoint's blocks; else quantized here


class BlockMatrix(NamedTuple):
    """A matrix `[out, in]` in blocks; an embedding and its tied head share it."""

    codes: ir.ExternalTensor  # uint8 [out, blocks, bytes of a block]
    scales: ir.Value  # [out, blocks]


class Shared(Generic[T]):
    """What several tensors are computed from; kept from the first that is asked for to the last."""

    def __init__(self, compute: Callable[[], T]) -> None:
        self._compute = compute
        self._readers = 0
        self._lock = Lock()  # workers compute tensors at once
        self._kept: list[T] = []

    def part(self, read: Callable[[T], npt.NDArray[np.generic]]) -> Compute:
        """Return a function for `lazy`, which has to be called once."""
        self._readers += 1
        return lambda: read(self._take())

    def _take(self) -> T:
        with self._lock:
            if not self._kept:
                self._kept.append(self._compute())
            self._readers -= 1
            return self._kept[0] if self._readers else self._kept.pop()


@dataclass(frozen=True)
class Scope:
    """Where nodes are added: in the graph, in a branch of it, or in the body of a part."""

    tape: Tape
    imports: dict[str, int]  # opset by domain
    is_body: bool = False  # a body sees nothing but its inputs
    constants: dict[str, ir.Value] = field(default_factory=dict)


class GraphBuilder:
    """Collects one ONNX graph that computes in float32; weights are read when it is saved.

    kind: of the engine, by whose facts graphs differ.
    """

    def __init__(
        self,
        name: str,
        spec: DecoderSpec,
        weights: Weights,
        kind: GraphKind = "onnxruntime",
        storage: Storage = COPIED,
    ) -> None:
        self.spec = spec
        self.weights = weights
        self.facts = graph_facts(kind)
        self.storage = storage
        self.has_fp8 = False  # whether a matrix is in e4m3
        # products round their inputs
        self.quantized = storage.bits is not None or (storage.keep_blocks and weights.has_blocks)
        self._data = DataFile()
        self._matrices: dict[tuple[Path, str], ir.Value] = {}
        self._block_matrices: dict[tuple[Path, str], BlockMatrix] = {}
        # ONNX Runtime has an operator of its own for hybrids, and 1.32 no kernel for the newer
        # opset's `Attention`: taken apart it takes ten times as long
        by_standard = spec.delta_nets and not self.facts.runtime_operators
        self._opset = HYBRID_OPSET if by_standard else OPSET
        self.graph = ir.Graph((), (), nodes=(), opset_imports={"": self._opset}, name=name)
        self._tape = Tape(self.graph)
        self._scope = Scope(self._tape, self.graph.opset_imports)
        self._parts: dict[Hashable, ir.Function] = {}

    def input(self, name: str, dtype: ir.DataType, shape: Sequence[int | str]) -> ir.Value:
        """Add a graph input; a string in `shape` names a dynamic dimension."""
        value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
        self.graph.inputs.append(value)
        return value

    def output(
        self, value: ir.Value, name: str, dtype: ir.DataType, shape: Sequence[int | str] | ir.Shape
    ) -> None:
        value.name = name
        value.type = ir.TensorType(dtype)
        value.shape = ir.Shape(shape)
        self.graph.outputs.append(value)

    def op(self, op_type: str, *inputs: ir.Value, **attributes: Attribute) -> ir.Value:
        return self._scope.tape.op(op_type, inputs, attributes)

    def runtime_op(self, op_type: str, *inputs: ir.Value, **attributes: Attribute) -> ir.Value:
        """Add a node of ONNX Runtime's own."""
        return self.runtime_ops(op_type, *inputs, outputs=1, **attributes)[0]

    def runtime_ops(
        self, op_type: str, *inputs: ir.Value, outputs: int, **attributes: Attribute
    ) -> Sequence[ir.Value]:
        self.graph.opset_imports[MICROSOFT] = 1
        self._scope.imports[MICROSOFT] = 1
        return self._scope.tape.op_multi_out(
            op_type, inputs, attributes, num_outputs=outputs, domain=MICROSOFT
        )

    def ops(
        self, op_type: str, *inputs: ir.Value, outputs: int, **attributes: Attribute
    ) -> Sequence[ir.Value]:
        return self._scope.tape.op_multi_out(op_type, inputs, attributes, num_outputs=outputs)

    def part(
        self,
        name: str,
        body: Callable[..., ir.Value],
        *inputs: ir.Value | None,
        **attributes: Attribute,
    ) -> ir.Value:
        """Add a part with one output; see `parts`."""
        return self.parts(name, body, *inputs, **attributes)[0]

    def parts(
        self,
        name: str,
        body: Body,
        *inputs: ir.Value | None,
        **attributes: Attribute,
    ) -> Sequence[ir.Value]:
        """Add a part of the graph by name: a node of a function whose body is standard operators.

        body: called with this builder, inputs and attributes, to add the body's nodes. Layers with
        equal attributes share a function, so a body must depend on nothing else.
        """
        present = tuple(value is not None for value in inputs)
        form = (name, present, tuple(attributes.items()))
        if form not in self._parts:
            overload = sum(function.name == name for function in self._parts.values())
            self._parts[form] = self._function(name, overload, body, present, attributes)
        function = self._parts[form]
        return self._scope.tape.op_multi_out(
            name,
            inputs,
            attributes,
            num_outputs=len(function.outputs),
            domain=PART_DOMAIN,
            overload=function.overload,
        )

    def _function(
        self,
        name: str,
        overload: int,
        body: Body,
        present: Sequence[bool],
        attributes: dict[str, Attribute],
    ) -> ir.Function:
        self.graph.opset_imports[PART_DOMAIN] = 1
        _, *names = signature(body).parameters
        inputs = [ir.Value(name=name) for name, _ in zip(names, present, strict=False)]
        graph = ir.Graph(inputs, (), nodes=(), opset_imports={"": self._opset}, name=name)
        outer = self._scope
        self._scope = Scope(Tape(graph), graph.opset_imports, is_body=True)
        given = [value if there else None for value, there in zip(inputs, present, strict=True)]
        outputs = body(self, *given, **attributes)
        graph.outputs.extend([outputs] if isinstance(outputs, ir.Value) else outputs)
        self._scope = outer
        declared = [ir.Attr(name, ir.AttributeType.UNDEFINED, None) for name in attributes]
        return ir.Function(PART_DOMAIN, name, str(overload or ""), graph=graph, attributes=declared)

    def when(self, condition: ir.Value, name: str, then: Build, otherwise: Build) -> ir.Value:
        """Compute `then()` where the bool scalar `condition` is true, else `otherwise()`.

        name: unique; values inside get names that begin with it.
        """
        branches = {
            "then_branch": self._branch(f"{name}_then", then),
            "else_branch": self._branch(f"{name}_else", otherwise),
        }
        return self._scope.tape.op("If", (condition,), branches)

    def _branch(self, name: str, build: Build) -> ir.Graph:
        outer = self._scope
        branch = ir.Graph((), (), nodes=(), name=name)
        self._scope = replace(outer, tape=Tape(branch))
        branch.outputs.append(build())
        self._scope = outer
        values = [value for node in branch for value in node.outputs]
        for i, value in enumerate(values):  # names are unique across branches
            value.name = f"{name}_{i}"
        return branch

    def split(self, value: ir.Value, sizes: Sequence[int], axis: int) -> Sequence[ir.Value]:
        return self.ops("Split", value, self.ints(*sizes), outputs=len(sizes), axis=axis)

    def ints(self, *values: int) -> ir.Value:
        """Return a 1-D int64 constant, shared by all its users."""
        return self._shared("ints_" + "_".join(map(str, values)), np.array(values, np.int64))

    def number(self, value: float) -> ir.Value:
        """Return a float32 constant `[1]`, shared by all its users."""
        return self._shared(f"float_{value}", np.array([value], np.float32))

    def filled(self, name: str, size: int, value: float) -> ir.Value:
        """Return a float32 constant `[size]` of one value, shared by all its users."""
        return self._shared(name, np.full(size, value, np.float32))

    def _shared(self, name: str, array: npt.NDArray[np.generic]) -> ir.Value:
        constants = self._scope.constants
        if name not in constants:
            constants[name] = self.constant(name, array)
        return constants[name]

    def constant(self, name: str, array: npt.NDArray[np.generic]) -> ir.Value:
        tensor = ir.tensor(array, name=name)
        if self._scope.is_body:
            return self._scope.tape.op("Constant", (), {"value": tensor})
        return self._tape.initializer(tensor)

    def vector(self, name: str, plus: float = 0.0) -> ir.Value:
        """Return a checkpoint tensor in float32 (norm weights), plus a number."""
        return self.lazy(name, self.weights.shape(name), lambda: self._float32(name) + plus)

    def matrix(self, name: str, weights: Weights | None = None) -> ir.Value:
        """Return a tensor in its own dtype, for Gather or `float32`; weights: its other owner's."""
        weights = weights or self.weights
        key = (weights.directory, name)
        if key not in self._matrices:  # one table may be embedding and head
            dtype = DTYPES[weights.dtype(name)]
            self._matrices[key] = self._copied(weights, (name,), weights.shape(name), dtype)
        return self._matrices[key]

    def float32(self, value: ir.Value, dtype: ir.DataType | None) -> ir.Value:
        """Cast `value` of `dtype` to float32; the cast of a weight is folded when loading."""
        if dtype == ir.DataType.FLOAT:
            return value
        return self.op("Cast", value, to=ir.DataType.FLOAT)

    def rows(self, weights: Weights, names: Sequence[str]) -> ir.Value:
        """Concatenate matrices `[out, in]` to float32 `[sum of outs, in]`, stored as they were."""
        if len(names) == 1:
            only = self.matrix(names[0], weights)
            return self.float32(only, only.dtype)
        dtypes = {weights.dtype(name) for name in names}
        dtype = DTYPES[dtypes.pop()] if len(dtypes) == 1 else ir.DataType.FLOAT
        inputs, outputs = _joined_shape(weights, names)
        return self.float32(self._copied(weights, names, (outputs, inputs), dtype), dtype)

    def fp8_rows(self, weights: Weights, names: Sequence[str]) -> ir.Value | None:
        """Concatenate matrices `[out, in]` to `[sum of outs, in]` in e4m3; None if not so stored.

        As in the checkpoint where it has them so, or with a scale for each output.
        """
        block = _kept_fp8_block(weights, names)
        if block is None and not self.storage.fp8:
            return None
        self.has_fp8 = True
        inputs, outputs = _joined_shape(weights, names)
        name = f"{'|'.join(names)}.fp8"

        def quantized(part: int) -> npt.NDArray[np.generic]:
            parts = []
            for name in names:
                for rows in weights.pieces(name, ROWS):
                    parts.append(quantize_to_fp8(rows.astype(np.float32))[part])
            return np.concatenate(parts)

        def unchanged(part: int) -> npt.NDArray[np.generic]:
            return np.concatenate([weights.fp8(name)[part] for name in names])

        read = quantized if block is None else unchanged
        codes = self.lazy(name, (outputs, inputs), partial(read, 0), FP8)
        blocks = 1 if block is None else -(-inputs // block)
        shape = (outputs,) if blocks == 1 else (outputs, blocks)
        scales = self.lazy(f"{name}_scale", shape, partial(read, 1))
        if blocks == 1:
            return self.op("DequantizeLinear", codes, scales, axis=0)
        assert block is not None
        return self.op("DequantizeLinear", codes, scales, axis=1, block_size=block)

    def block_form(self, weights: Weights, name: str, bits: Bits | None) -> BlockForm | None:
        """Return how a matrix `[out, in]` is kept if it is to have at most `bits`; None: plain."""
        form = weights.form(name) if self.storage.keep_blocks else None
        if form is not None and form.bits <= (bits or 8):
            return BlockForm(form, copied=True)
        if bits is None or weights.shape(name)[1] % BLOCK:
            return None
        return BlockForm(Form(bits, BLOCK), copied=False)

    def multiply_blocks(
        self, weights: Weights, x: ir.Value, names: Sequence[str], kept: BlockForm
    ) -> ir.Value:
        """Multiply `x` `[T, in]` by matrices `[out, in]` in blocks: `[T, sum of outs]`.

        ONNX Runtime rounds `x` to int8. Offsets of blocks are multiplied apart, by sums of `x`.
        """
        form = kept.form
        inputs, outputs = _joined_shape(weights, names)
        rows = self._packed(weights, names, kept)
        matrix = self._block_matrix(weights, names, form, rows)
        name = "|".join(names)
        codes = _view(matrix.codes, f"{name}.codes", tuple(matrix.codes.shape.numpy()))
        operands = [self._tape.initializer(codes), matrix.scales]
        if not kept.copied and form.bits == 4:
            read = rows.part(lambda packed: _present(packed.zeros))
            width = -(-inputs // form.block * form.bits // 8)
            operands.append(self.lazy(f"{name}.zeros", (outputs, width), read, ir.DataType.UINT8))
        out = self.runtime_op(
            "MatMulNBits",
            x,
            *operands,
            K=inputs,
            N=outputs,
            bits=form.bits,
            block_size=form.block,
            accuracy_level=INT8_INPUTS,
        )
        if not form.has_offsets:
            return out

        def of_codes(packed: PackedRows) -> Floats:
            """Return the offsets of codes that are shifted (2^-24 of it is lost)."""
            return (_present(packed.offsets) + np.float32(form.shift) * packed.scales).T

        shape = (inputs // form.block, outputs)
        offsets = self.lazy(f"{name}.code_offsets", shape, rows.part(of_codes))
        # not (0, -1, block): an expert may have no rows
        sums = self.op("Reshape", x, self.ints(-1, inputs // form.block, form.block))
        sums = self.op("ReduceSum", sums, self.ints(-1), keepdims=0)
        return self.op("Gemm", sums, offsets, out)

    def embed(self, weights: Weights, name: str, ids: ir.Value) -> ir.Value:
        """Read rows int64 `[T]` of a matrix `[vocab, width]` in float32: `[T, width]`."""
        kept = self.block_form(weights, name, None)
        if kept is None:
            table = self.matrix(name, weights)
            return self.float32(self.op("Gather", table, ids, axis=0), table.dtype)
        form = kept.form
        vocab, width = weights.shape(name)
        blocks = width // form.block
        rows = self._packed(weights, (name,), kept)
        matrix = self._block_matrix(weights, (name,), form, rows)
        flat = _view(matrix.codes, f"{name}.flat", (vocab, width * form.bits // 8))
        numbers = self.runtime_op(
            "GatherBlockQuantized",
            self._tape.initializer(flat),
            ids,
            matrix.scales,
            bits=form.bits,
            block_size=form.block,
            gather_axis=0,
            quantize_axis=1,
        )
        if not form.has_offsets:
            return numbers
        # in this order, so that the sum rounds once: both products are exact
        read = rows.part(lambda packed: _present(packed.offsets))
        offsets = self.lazy(f"{name}.offsets", (vocab, blocks), read)
        shift = self.op("Mul", self.op("Gather", matrix.scales, ids), self.number(form.shift))
        offset = self.op("Gather", offsets, ids)
        numbers = self.op("Reshape", numbers, self.ints(0, blocks, form.block))
        numbers = self.op("Add", numbers, self.op("Unsqueeze", shift, self.ints(2)))
        numbers = self.op("Add", numbers, self.op("Unsqueeze", offset, self.ints(2)))
        return self.op("Reshape", numbers, self.ints(0, width))

    def _packed(
        self, weights: Weights, names: Sequence[str], kept: BlockForm
    ) -> Shared[PackedRows]:
        """Return what reads matrices `[out, in]`, or quantizes them, one under the other."""
        bits = kept.form.bits

        def pieces() -> Iterator[PackedRows]:
            for name in names:
                if kept.copied:
                    for blocks in weights.blocks(name, ROWS):
                        yield pack_rows(Rows(*blocks), bits)
                else:
                    for rows in weights.pieces(name, ROWS):
                        yield pack_rows(quantize_rows(rows.astype(np.float32), bits), bits)

        return Shared(lambda: join_rows(pieces()))

    def _block_matrix(
        self, weights: Weights, names: Sequence[str], form: Form, rows: Shared[PackedRows]
    ) -> BlockMatrix:
        name = "|".join(names)
        key = (weights.directory, name)
        if key not in self._block_matrices:
            inputs, outputs = _joined_shape(weights, names)
            blocks = inputs // form.block
            shape = (outputs, blocks, form.block * form.bits // 8)
            read = rows.part(lambda packed: packed.codes)
            codes = self._placed(name, shape, ir.DataType.UINT8, read)
            read = rows.part(lambda packed: packed.scales)
            scales = self.lazy(f"{name}.scales", (outputs, blocks), read)
            self._block_matrices[key] = BlockMatrix(codes, scales)
        return self._block_matrices[key]

    def multiply_in_int8(self, weights: Weights, x: ir.Value, names: Sequence[str]) -> ir.Value:
        """Multiply `x` `[T, in]` by matrices `[out, in]` as integers: `[T, outs]`.

        Each row of `x` has a scale, so that no row depends on another, and so has each output.
        """
        shape = _joined_shape(weights, names)
        name = f"{'|'.join(names)}.int8"

        def columns() -> ScaledColumns:
            pieces = [
                quantize_to_7_bits(rows.astype(np.float32))
                for name in names
                for rows in weights.pieces(name, ROWS)
            ]
            codes, scales = zip(*pieces, strict=True)
            return ScaledColumns(np.concatenate(codes, axis=1), np.concatenate(scales, axis=1))

        shared = Shared(columns)
        matrix = self.lazy(name, shape, shared.part(lambda whole: whole.codes), ir.DataType.INT8)
        read = shared.part(lambda whole: whole.scales / np.float32(127))
        scales = self.lazy(f"{name}_scale", (1, shape[1]), read)
        largest = self.op("ReduceMax", self.op("Abs", x), self.ints(-1))
        largest = self.op("Max", largest, self.number(1e-9))
        codes = self.op("Mul", x, self.op("Div", self.number(127), largest))
        codes = self.op("Round", self.op("Add", codes, self.number(ZERO)))
        codes = self.op("Cast", codes, to=ir.DataType.UINT8)
        zero = self.constant(f"{name}_zero", np.array([ZERO], np.uint8))
        out = self.op("MatMulInteger", codes, matrix, zero)
        out = self.op("Mul", self.op("Cast", out, to=ir.DataType.FLOAT), scales)
        return self.op("Mul", out, largest)

    def bias(self, *names: str) -> ir.Value:
        def read() -> npt.NDArray[np.generic]:
            return np.concatenate([self._float32(name) for name in names])

        size = sum(self.weights.shape(name)[0] for name in names)
        return self.lazy("|".join(names), (size,), read)

    def model(self) -> ir.Model:
        """Return the graph with the bodies of its parts."""
        return ir.Model(
            self.graph,
            ir_version=IR_VERSION,
            producer_name="dflash-trt",
            functions=list(self._parts.values()),
        )

    def save(self, directory: Path, progress: Callable[[str], None]) -> dict[Path, Entry]:
        """Write the graph; return the manifest's entry of its data, so that nobody reads it again.

        `progress` is called with each tensor's name.
        """
        model = self.model()
        values = [value for graph in model.graphs() for value in graph.initializers.values()]
        for value in values:
            tensor = value.const_value
            assert tensor is not None
            if not isinstance(tensor, ir.ExternalTensor) and tensor.nbytes > INSIDE:
                shape = tuple(tensor.shape.numpy())
                name = tensor.name or ""
                value.const_value = self._placed(name, shape, tensor.dtype, tensor.numpy)
        entry = self._data.write(directory / WEIGHTS_FILE, progress)
        ir.save(model, directory / "model.onnx")
        return {directory / WEIGHTS_FILE: entry}

    def lazy(
        self,
        name: str,
        shape: tuple[int, ...],
        read: Compute,
        dtype: ir.DataType = ir.DataType.FLOAT,
    ) -> ir.Value:
        """Return a weight that is computed when the graph is saved."""
        return self._tape.initializer(self._placed(name, shape, dtype, read))

    def _copied(
        self, weights: Weights, names: Sequence[str], shape: tuple[int, ...], dtype: ir.DataType
    ) -> ir.Value:
        """Concatenate tensors, copied as stored in their files, or computed."""

        def read() -> npt.NDArray[np.generic]:
            return np.concatenate([weights.read(name) for name in names], dtype=dtype.numpy())

        spans = []
        for name in names:
            place = weights.place(name)
            if place is not None and DTYPES[weights.dtype(name)] == dtype:
                spans.append(Span(*place, _size(weights.shape(name), dtype)))
        source = spans if len(spans) == len(names) else read
        return self._tape.initializer(self._placed("|".join(names), shape, dtype, source))

    def _float32(self, name: str) -> npt.NDArray[np.float32]:
        return self.weights.read(name).astype(np.float32)

    def _placed(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: ir.DataType,
        source: Sequence[Span] | Compute,
    ) -> ir.ExternalTensor:
        size = _size(shape, dtype)
        offset = self._data.add(name, size, source)
        return ir.ExternalTensor(
            WEIGHTS_FILE, offset, size, dtype, shape=ir.Shape(shape), name=name
        )


def _size(shape: tuple[int, ...], dtype: ir.DataType) -> int:
    return math.ceil(math.prod(shape) * dtype.itemsize)  # two int4 are a byte


def _view(tensor: ir.ExternalTensor, name: str, shape: tuple[int, ...]) -> ir.ExternalTensor:
    """Return the same bytes as a tensor of another name and shape."""
    return ir.ExternalTensor(
        WEIGHTS_FILE, tensor.offset, tensor.length, tensor.dtype, shape=ir.Shape(shape), name=name
    )


def _present(part: P | None) -> P:
    assert part is not None
    return part


def _kept_fp8_block(weights: Weights, names: Sequence[str]) -> int | None:
    """Return how many inputs share a scale where all matrices are in e4m3, if kernels take it."""
    blocks = {weights.fp8_block(name) for name in names}
    block = blocks.pop()
    if blocks or block is None:
        return None
    return block if block in FP8_BLOCKS or block == weights.shape(names[0])[1] else None


def _joined_shape(weights: Weights, names: Sequence[str]) -> tuple[int, int]:
    """Return the shape `[in, sum of outs]` of linear layers `[out, in]` as one matrix."""
    return weights.shape(names[0])[1], sum(weights.shape(name)[0] for name in names)

"""A graph as a list of calls on tensors of one device.

Sizes are computed on the host, when a step of new sizes comes for the first time: the calls of a
step depend on nothing that is on the device, so that they can be recorded.
"""

import mmap
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from dflash_trt.engines.pytorch.operators import OPERATORS, SIZES
from dflash_trt.errors import EngineError

FP8 = torch.float8_e4m3fn  # stays as it is: kernels widen it
HOST = (torch.int64, torch.bool)  # types of sizes; weights have others
# what writes into caches by itself
WRITERS = ("AttentionInput", "TensorScatter")
Parts = dict[tuple[str, str, str], ir.Function]
Kernels = Mapping[str, Callable[..., Any]]
Scope = Mapping[str | None, str | None]
Argument = str | tuple[int, ...] | None  # a value's name, numbers of the host, or an input left out


@dataclass(frozen=True)
class Call:
    """One function on the device."""

    op: str  # ONNX's name, or that of a kernel
    run: Callable[..., Any]
    arguments: tuple[Argument, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    last: tuple[str, ...] = ()  # values that no later call reads

    @property
    def inputs(self) -> list[str]:
        """Return the names of the tensors that it reads."""
        return [argument for argument in self.arguments if isinstance(argument, str)]

    @property
    def output(self) -> str:
        return self.outputs[0]


@dataclass(frozen=True)
class Calls:
    """What a step of certain sizes does."""

    calls: list[Call]
    constants: dict[str, Tensor]  # of the host's numbers, those that calls read
    shapes: dict[str, Tensor]  # of every value: a tensor without memory
    results: tuple[str, ...]

    def run(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Run on weights, inputs and caches by name; return the graph's outputs but the caches."""
        values = values | self.constants
        for call in self.calls:
            outputs = call.run(*_tensors(call.arguments, values), **call.attributes)
            if isinstance(outputs, Tensor):
                outputs = (outputs,)
            values.update(zip(call.outputs, outputs, strict=True))
            for name in call.last:
                del values[name]
        return {name: values[name] for name in self.results}


class Program:
    """A graph's nodes, and its weights on a device.

    dtype: of matrices that are multiplied. Nodes that only weights go into are computed once.
    """

    def __init__(self, path: Path, dtype: torch.dtype, device: str) -> None:
        model = ir.load(path)
        graph = model.graph
        self.device = device
        self.parts: Parts = dict(model.functions)
        self.caches = {
            value.name: value.name.removeprefix("new_")
            for value in graph.outputs
            if value.name is not None and value.name.startswith("new_")
        }
        self.results = tuple(_names(graph.outputs, without=self.caches))
        self.numbers: dict[str, Tensor] = {}  # of the host
        weights: dict[str, Tensor] = {}
        read = _reader(path.parent)
        for name, value in graph.initializers.items():
            assert value.const_value is not None
            tensor = read(value.const_value)
            (self.numbers if tensor.dtype in HOST else weights)[name] = tensor
        self.nodes = _fold(graph, self.numbers, weights)
        matrices = _matrices(self.nodes, self.parts)
        used = {name for node in _all_nodes(self.nodes) for name in _names(node.inputs)}
        self.weights = {
            name: weight.to(device, dtype if name in matrices else weight.dtype)
            for name, weight in weights.items()
            if name in used
        }

    def transposed(self, name: str) -> str:
        """Return the name of a matrix whose columns are the rows of another, made once."""
        turned = f"{name}:transposed"
        if turned not in self.weights:
            self.weights[turned] = self.weights[name].T.contiguous()
        return turned

    def calls(
        self,
        inputs: Mapping[str, Tensor],
        known: int = 0,
        replayed: int = 0,
        kernels: Kernels | None = None,
    ) -> Calls:
        """Return the calls of a step; inputs: as large as the step's, of any device.

        known, replayed: of a hybrid (`graphs.delta_net.Rollback`). kernels: by the names of what
        they replace, parts or operators; the bodies of other parts are run.
        """
        lowering = _Lowering(self, inputs, known, replayed, kernels or {})
        for node in self.nodes:
            lowering.add(node)
        lowering.store_caches()
        read = {name for call in lowering.calls for name in call.inputs}
        constants = {
            name: number.to(self.device)
            for name, number in lowering.constants.items()
            if name in read
        }
        calls = Calls(lowering.calls, constants, lowering.shapes, self.results)
        return replace(calls, calls=with_last_uses(calls))


def with_last_uses(calls: Calls) -> list[Call]:
    """Say after which call each value is not needed, so that its memory is free."""
    made = {name for call in calls.calls for name in call.outputs} - {*calls.results}
    seen: set[str] = set()
    counted = []
    for call in reversed(calls.calls):
        last = {name for name in (*call.inputs, *call.outputs) if name in made} - seen
        seen |= last
        counted.append(replace(call, last=tuple(sorted(last))))
    return counted[::-1]


class _Lowering:
    def __init__(
        self,
        program: Program,
        inputs: Mapping[str, Tensor],
        known: int,
        replayed: int,
        kernels: Kernels,
    ) -> None:
        self._program = program
        self._replayed = replayed
        self._kernels = kernels
        self.calls: list[Call] = []
        self.constants: dict[str, Tensor] = {}
        self.shapes = {
            name: tensor.to("meta") for name, tensor in (program.weights | dict(inputs)).items()
        }
        self._host = dict(program.numbers)
        # what calls return, by what they get: layers are alike
        self._returned: dict[Hashable, Sequence[Tensor]] = {}
        if "known" in inputs:
            self._host["known"] = torch.tensor([known])

    def add(self, node: ir.Node, scope: Scope | None = None) -> None:
        """Add a node; scope: names of the values in a part's body."""
        scope = scope or {}
        names = [
            None if value is None else scope.get(value.name, value.name) for value in node.inputs
        ]
        outputs = tuple(scope.get(name) or name for name in _names(node.outputs))
        if node.op_identifier() in self._program.parts:
            self._add_part(node, names, outputs)
        elif node.op_type == "Constant":
            number = node.attributes["value"].as_tensor().numpy()
            self._host[outputs[0]] = torch.from_numpy(np.array(number))
        elif node.op_type == "Shape":
            self._host[outputs[0]] = self._shape(node, names[0])
        elif node.op_type == "ReduceMax" and self._is_number(names[0]):
            # the one size that depends on numbers of the device: the host knows it
            self._host[outputs[0]] = torch.tensor([self._replayed])
        elif node.op_type == "If":
            self._add_branch(node, names[0], outputs[0])
        elif all(name is None or name in self._host for name in names):
            arguments = self._arguments(node.op_type, names)
            results = function(node)(*_tensors(arguments, self._host), **_attributes(node))
            results = (results,) if isinstance(results, Tensor) else results
            self._host.update(zip(outputs, results, strict=True))
        else:
            arguments = self._arguments(node.op_type, names)
            self._call(node.op_type, function(node), arguments, outputs, _attributes(node))

    def _add_part(
        self, node: ir.Node, names: Sequence[str | None], outputs: tuple[str, ...]
    ) -> None:
        """Add a part's kernel, or its body where there is none; the body tells what comes out."""
        body = self._program.parts[node.op_identifier()]
        scope: dict[str | None, str | None] = {
            value.name: f"{outputs[0]}/{value.name}" for inner in body for value in inner.outputs
        }
        scope |= zip((value.name for value in body.inputs), names, strict=False)
        scope |= zip((value.name for value in body.outputs), outputs, strict=True)
        before = len(self.calls)
        for inner in body:
            self.add(inner, scope)
        if node.op_type in self._kernels:
            kernel = self._kernels[node.op_type]
            call = Call(node.op_type, kernel, tuple(names), outputs, _attributes(node))
            self.calls[before:] = [call]

    def store_caches(self) -> None:
        """Write what caches become into their memory, unless a call did so."""
        writers = {name: call for call in self.calls for name in call.outputs}
        for name, cache in self._program.caches.items():
            if writers[name].op not in WRITERS:
                self.calls.append(Call("Store", _store, (cache, name), (f"{name}_stored",)))

    def _shape(self, node: ir.Node, name: str | None) -> Tensor:
        assert name is not None
        value = self.shapes[name] if name in self.shapes else self._host[name]
        attributes = _attributes(node)
        start, end = attributes.get("start", 0), attributes.get("end")
        return torch.tensor(value.shape[start:end], dtype=torch.int64)

    def _is_number(self, name: str | None) -> bool:
        return name in self.shapes and self.shapes[name].dtype == torch.int64

    def _add_branch(self, node: ir.Node, condition: str | None, output: str) -> None:
        assert condition is not None
        taken = "then_branch" if bool(self._host[condition]) else "else_branch"
        branch = node.attributes[taken].as_graph()
        for inner in branch:
            self.add(inner)
        (result,) = _names(branch.outputs)
        self._call("Identity", OPERATORS["Identity"], (result,), (output,), {})

    def _arguments(self, op: str, names: Sequence[str | None]) -> tuple[Argument, ...]:
        sizes = SIZES.get(op, ())
        return tuple(
            self._numbers(op, name) if place in sizes else name for place, name in enumerate(names)
        )

    def _numbers(self, op: str, name: str | None) -> tuple[int, ...] | None:
        if name is None:
            return None
        if name not in self._host:
            raise EngineError(
                f"{op} has the size {name}, which depends on numbers of the GPU",
                "Run `dflash-trt build` again, with this version",
            )
        return tuple(self._host[name].reshape(-1).tolist())

    def _call(
        self,
        op: str,
        run: Callable[..., Any],
        arguments: tuple[Argument, ...],
        outputs: tuple[str, ...],
        attributes: Mapping[str, Any],
    ) -> None:
        for name in arguments:
            if isinstance(name, str) and name not in self.shapes:
                self.constants[name] = self._host[name]
                self.shapes[name] = self._host[name].to("meta")
        given = [self._kind(argument) for argument in arguments]
        key = (run, *given, *((name, str(value)) for name, value in attributes.items()))
        if key not in self._returned:
            results = run(*_tensors(arguments, self.shapes), **attributes)
            self._returned[key] = (results,) if isinstance(results, Tensor) else results
        self.shapes.update(zip(outputs, self._returned[key], strict=True))
        self.calls.append(Call(op, self._kernels.get(op, run), arguments, outputs, attributes))

    def _kind(self, argument: Argument) -> Hashable:
        """Return what a call's results without memory depend on."""
        if not isinstance(argument, str):
            return argument
        tensor = self.shapes[argument]
        return tensor.dtype, tuple(tensor.shape), tensor.stride()


def function(node: ir.Node) -> Callable[..., Any]:
    """Return a node's function; EngineError if there is none."""
    run = OPERATORS.get(node.op_type)
    if run is None:
        raise EngineError(
            f"the graph has the operator {node.op_type}, which engine kind pytorch does not know",
            "Run `dflash-trt build` again, with this version",
        )
    return run


def _store(cache: Tensor, value: Tensor) -> Tensor:
    return cache.copy_(value)


def _tensors(arguments: Sequence[Argument], values: Mapping[str, Tensor]) -> list[Any]:
    return [values[argument] if isinstance(argument, str) else argument for argument in arguments]


def _names(values: Iterable[ir.Value | None], without: Iterable[str] = ()) -> list[str]:
    names = [value.name for value in values if value is not None and value.name]
    return [name for name in names if name not in without]


def _attributes(node: ir.Node) -> dict[str, Any]:
    return {name: attribute.value for name, attribute in node.attributes.items()}


def _all_nodes(nodes: Iterable[ir.Node]) -> Iterable[ir.Node]:
    """Yield nodes, and those of their branches."""
    for node in nodes:
        yield node
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                yield from _all_nodes(attribute.as_graph())


def _fold(
    graph: ir.Graph, numbers: Mapping[str, Tensor], weights: dict[str, Tensor]
) -> list[ir.Node]:
    """Add to `weights` what is made of them alone; return the other nodes.

    Casts of weights to float32 are dropped: what reads them widens them.
    """
    left = []
    uses = Counter(name for node in _all_nodes(graph) for name in _names(node.inputs))
    for node in graph:
        names = _names(node.inputs)
        of_weights = any(name in weights for name in names)
        given = all(name in weights or name in numbers for name in names)
        if not (of_weights and given) or weights[names[0]].dtype == FP8:
            left.append(node)
            continue
        if node.op_type == "Cast":
            results: Sequence[Tensor] = [weights[names[0]]]
        else:
            sizes = SIZES.get(node.op_type, ())
            arguments = [
                tuple(numbers[name].tolist()) if place in sizes else weights[name]
                for place, name in enumerate(names)
            ]
            result = function(node)(*arguments, **_attributes(node))
            results = [result] if isinstance(result, Tensor) else result
        weights.update(zip(_names(node.outputs), results, strict=True))
        uses.subtract(names)
        for name in names:
            if not uses[name]:
                weights.pop(name, None)
    return left


def _matrices(nodes: Iterable[ir.Node], parts: Parts) -> set[str]:
    """Return the names of what is multiplied, in the bodies of parts too."""
    names: set[str] = set()
    for node in _all_nodes(nodes):
        if node.op_type in ("Gemm", "MatMul"):
            names.update(_names(node.inputs[:2]))
        elif node.op_identifier() in parts:
            body = parts[node.op_identifier()]
            inside = _matrices(body, parts)
            pairs = zip(body.inputs, node.inputs, strict=False)
            names.update(_names(given for value, given in pairs if value.name in inside))
    return names


def _reader(directory: Path) -> Callable[[Any], Tensor]:
    """Return what reads tensors; those of a data file stay on the disk until they are used."""
    files: dict[str, mmap.mmap] = {}

    def external(tensor: ir.ExternalTensor) -> Tensor:
        location = str(tensor.location)
        if location not in files:
            with (directory / location).open("rb") as file:
                # a private copy: PyTorch wants memory that may be written
                files[location] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        assert tensor.offset is not None
        assert tensor.length is not None
        dtype = _torch_type(tensor.dtype)
        count = tensor.length // dtype.itemsize
        flat = torch.frombuffer(files[location], dtype=dtype, count=count, offset=tensor.offset)
        return flat.reshape(tuple(tensor.shape.numpy()))

    def read(tensor: Any) -> Tensor:
        if isinstance(tensor, ir.ExternalTensor):
            return external(tensor)
        return torch.from_numpy(np.array(tensor.numpy()))

    return read


def _torch_type(dtype: ir.DataType) -> torch.dtype:
    names = {"float": "float32", "double": "float64", "float8e4m3fn": "float8_e4m3fn"}
    name = dtype.name.lower()
    torch_type: torch.dtype = getattr(torch, names.get(name, name))
    return torch_type

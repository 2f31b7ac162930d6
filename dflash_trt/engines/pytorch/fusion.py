"""Kernels for the parts of a graph, by name, and what they do together.

A product comes in parts, which whoever reads it adds up; a call that adds it to the residual stream
norms the sum too. All else stays as the program has it: it is elementwise, or moves numbers.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dflash_trt.engines.pytorch import launch
from dflash_trt.engines.pytorch.program import (
    WRITERS,
    Argument,
    Call,
    Calls,
    Program,
    with_last_uses,
)


@dataclass(frozen=True)
class Kernel:
    run: Callable[..., Any]
    # how many of its inputs, the first ones, are products: it adds up their parts and bias
    products: int = 0
    # its first output has the type of the weights where only products read it
    narrows: bool = False


# by the names of parts and operators
KERNELS: Mapping[str, Kernel] = {
    "Attend": Kernel(launch.attend, narrows=True),
    "AttentionInput": Kernel(launch.attention_input, products=2, narrows=True),
    "Convolve": Kernel(launch.convolve),
    "Decays": Kernel(launch.decays),
    "ExpertProduct": Kernel(launch.experts),
    "ExpertSum": Kernel(launch.add_experts),
    "Gate": Kernel(launch.gated, products=1, narrows=True),
    "GatedNorm": Kernel(launch.gated_norm, narrows=True),
    "RMSNormalization": Kernel(launch.norm, narrows=True),
    "Recur": Kernel(launch.recur),
}
PRODUCTS = ("Attend", "Linear")  # what reads numbers in the type of the weights


def without_kernel(program: Program) -> list[str]:
    """Return the parts of a graph whose bodies are run."""
    return sorted({name for _, name, _ in program.parts} - KERNELS.keys())


def kernel_calls(
    program: Program, inputs: Mapping[str, Tensor], known: int, replayed: int, dtype: torch.dtype
) -> Calls:
    """Return the calls of a step (`Program.calls`), by kernels; dtype: of the matrices."""
    kernels = {name: kernel.run for name, kernel in KERNELS.items()}
    calls = program.calls(inputs, known, replayed, kernels)
    listed = _products(program, calls, dtype)
    listed = _add_norms(program, calls, listed)
    listed = _take_parts(calls, listed)
    listed = _without_unread(calls, listed)
    listed = _narrow(calls, listed, dtype)
    return replace(calls, calls=with_last_uses(replace(calls, calls=listed)))


class View:
    """Calls with who makes and reads each value."""

    def __init__(self, calls: Calls, listed: Iterable[Call]) -> None:
        self._results = calls.results
        self._makers: dict[str, Call] = {}
        self._readers: dict[str, list[Call]] = {}
        for call in listed:
            for name in call.outputs:
                self._makers[name] = call
            for name in dict.fromkeys(call.inputs):
                self._readers.setdefault(name, []).append(call)

    def maker(self, name: object, op: str) -> Call | None:
        """Return the call of kind `op` that makes a value."""
        call = self._makers.get(name) if isinstance(name, str) else None
        return call if call is not None and call.op == op else None

    def readers(self, name: str) -> list[Call]:
        return self._readers.get(name, [])

    def only_reader(self, name: str) -> Call | None:
        """Return the call that alone reads a value."""
        readers = self.readers(name)
        return readers[0] if len(readers) == 1 and name not in self._results else None

    def is_read(self, call: Call) -> bool:
        return any(self.readers(name) or name in self._results for name in call.outputs)

    def is_for_products(self, name: str) -> bool:
        products = all(call.op in PRODUCTS for call in self.readers(name))
        return products and name not in self._results


def _products(program: Program, calls: Calls, dtype: torch.dtype) -> list[Call]:
    """Make each product with a weight two calls: of its parts, and what adds them up."""
    view = View(calls, calls.calls)
    listed = []
    for call in calls.calls:
        matrix = _matrix(program, calls, view, call)
        if matrix is None:
            listed.append(call)
            continue
        x, _, *bias = call.arguments
        parts = f"{call.output}:parts"
        options = {"dtype": dtype, "block": matrix.block}
        given = (x, matrix.weight, matrix.scales)
        listed.append(Call("Linear", launch.linear, given, (parts,), options))
        add_up = (parts, bias[0] if bias else None)
        listed.append(Call("AddUp", launch.add_up, add_up, call.outputs))
    return listed


@dataclass(frozen=True)
class Matrix:
    """A weight `[columns, depth]`, as `launch.linear` takes it."""

    weight: Argument
    scales: Argument = None
    block: int = 0


def _matrix(program: Program, calls: Calls, view: View, call: Call) -> Matrix | None:
    """Return what a call multiplies rows by; None if it is no product of rows with a weight."""
    if call.op not in ("Gemm", "MatMul"):
        return None
    x, weight = call.arguments[:2]
    assert isinstance(x, str)
    assert isinstance(weight, str)
    if calls.shapes[weight].dim() != 2 or calls.shapes[x].dim() != 2:
        return None
    scaled = view.maker(weight, "DequantizeLinear")
    if scaled is not None:
        codes, scales = scaled.arguments
        return Matrix(codes, scales, scaled.attributes.get("block_size", 0))
    if weight not in program.weights:
        return None
    return Matrix(weight if call.attributes.get("transB") else program.transposed(weight))


def _add_norms(program: Program, calls: Calls, listed: list[Call]) -> list[Call]:
    """Add a product to the residual stream and norm the sum in one call."""
    view = View(calls, listed)
    gone: set[str] = set()
    fused: dict[str, Call] = {}  # by the sum
    for call in listed:
        add = view.only_reader(call.output) if call.op == "AddUp" else None
        if add is None or add.op != "Add":
            continue
        norms = [read for read in view.readers(add.output) if read.op == "RMSNormalization"]
        residual = next(name for name in add.inputs if name != call.output)
        if len(norms) != 1 or calls.shapes[residual].shape != calls.shapes[call.output].shape:
            continue
        (norm,) = norms
        assert norm.arguments[1] in program.weights
        gone |= {call.output, norm.output}
        fused[add.output] = Call(
            "AddNorm",
            launch.add_norm,
            (*call.arguments, residual, norm.arguments[1]),
            (add.output, norm.output),
            {"epsilon": norm.attributes["epsilon"]},
        )
    return [fused.get(call.output, call) for call in listed if call.output not in gone]


def _take_parts(calls: Calls, listed: list[Call]) -> list[Call]:
    """Let kernels add up the products that they alone read."""
    view = View(calls, listed)
    gone: set[str] = set()
    left = []
    for call in listed:
        products = KERNELS[call.op].products if call.op in KERNELS else 0
        taken: list[Argument] = []
        for name in call.arguments[:products]:
            product = view.maker(name, "AddUp")
            if name is None:
                taken += [None, None]
            elif product is not None and view.only_reader(product.output) is not None:
                gone.add(product.output)
                taken += product.arguments
            else:
                whole = f"{name}:whole"
                left.append(Call("Whole", _whole, (name,), (whole,)))
                taken += [whole, None]
        left.append(replace(call, arguments=(*taken, *call.arguments[products:])))
    return [call for call in left if call.output not in gone]


def _whole(x: Tensor) -> Tensor:
    """Return numbers as a product in one part."""
    return x[None]


def _without_unread(calls: Calls, listed: list[Call]) -> list[Call]:
    while True:
        view = View(calls, listed)
        left = [call for call in listed if call.op in ("Store", *WRITERS) or view.is_read(call)]
        if len(left) == len(listed):
            return left
        listed = left


def _narrow(calls: Calls, listed: list[Call], dtype: torch.dtype) -> list[Call]:
    """Say in which type kernels store what they make."""
    view = View(calls, listed)
    narrowed = []
    for call in listed:
        if call.op == "AddNorm":
            result = call.outputs[1]
        elif call.op in KERNELS and KERNELS[call.op].narrows:
            result = call.output
        else:
            narrowed.append(call)
            continue
        stored = dtype if view.is_for_products(result) else torch.float32
        narrowed.append(replace(call, attributes={**call.attributes, "dtype": stored}))
    return narrowed

"""Dataclasses to Triton tensors and back: a field is a tensor of the same name.

Imports `triton_python_backend_utils`, which exists only inside Triton's Python backend.
"""

from dataclasses import fields
from typing import Any, TypeVar

import numpy as np
import triton_python_backend_utils as pb

from dflash_trt.serving.requests import Part

T = TypeVar("T")


def to_tensors(value: Any) -> list[Any]:
    """The fields of a dataclass of arrays as `pb.Tensor`s."""
    return [pb.Tensor(f.name, np.ascontiguousarray(getattr(value, f.name))) for f in fields(value)]


def from_request(cls: type[T], request: Any) -> T:
    """A dataclass of arrays from the input tensors of a request."""
    return cls(**{f.name: _input(request, f.name) for f in fields(cls)})  # type: ignore[arg-type]


def from_response(cls: type[T], response: Any) -> T:
    """A dataclass of arrays from the output tensors of a response; the arrays are copies."""
    return cls(**{f.name: _output(response, f.name).copy() for f in fields(cls)})  # type: ignore[arg-type]


def inputs(request: Any) -> dict[str, np.ndarray[Any, Any]]:
    """All input tensors of a request by name; optional ones that were not sent are absent."""
    return {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}


def part_tensors(part: Part) -> list[Any]:
    """The output tensors of the public model: scalars have shape [1], lists [len]."""
    tensors = []
    for field in fields(part):
        value = getattr(part, field.name)
        if isinstance(value, str):
            array = np.array([value.encode()], dtype=object)
        else:
            array = np.array(value, dtype=np.float32 if isinstance(value, float) else np.int32)
        tensors.append(pb.Tensor(field.name, np.atleast_1d(array)))
    return tensors


def _input(request: Any, name: str) -> Any:
    return pb.get_input_tensor_by_name(request, name).as_numpy()


def _output(response: Any, name: str) -> Any:
    return pb.get_output_tensor_by_name(response, name).as_numpy()

"""Conversion of named tuples of arrays to Triton tensors and back; fields are tensor names.

Imports `triton_python_backend_utils`, which exists only inside Triton's Python backend.
"""

import json
import struct
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
import triton_python_backend_utils as pb

from dflash_trt.request_schema import TRITON_PARAMETERS, check_names
from dflash_trt.serving.keys import CLIENT, CLIENT_KEY
from dflash_trt.serving.tracing import CONTEXT, HEADER, valid_or_new_id
from dflash_trt.wire import CODED_ERRORS

T = TypeVar("T")
KNOWN = {*TRITON_PARAMETERS, HEADER, CLIENT, CLIENT_KEY, CODED_ERRORS, *CONTEXT}
MAX_STRINGS, MAX_STRING = 4096, 2**23  # strings, bytes of each: above all limits


class _Truncated(np.ndarray[Any, Any]):
    """The first strings of a tensor; ignores the full shape that Triton applies."""

    def reshape(self, *_: Any, **__: Any) -> "_Truncated":
        return self


def _first_strings(encoded: Any) -> np.ndarray[Any, Any]:
    """Return the strings of a BYTES tensor, at most `MAX_STRINGS`.

    Triton 2.51 makes Python objects of all strings before a model sees the request: 10 million of
    them blocked the server for 7 s. An exception in here would end the process.
    """
    data, strings, at = memoryview(encoded), list[bytes](), 0
    while at < len(data) and len(strings) < MAX_STRINGS:
        (size,) = struct.unpack_from("<I", data, at)
        strings.append(bytes(data[at + 4 : at + 4 + min(size, MAX_STRING)]))
        at += 4 + size
    texts = np.array(strings, object)
    return texts if at >= len(data) else texts.view(_Truncated)


pb.deserialize_bytes_tensor = _first_strings


def to_tensors(values: Mapping[str, Any]) -> list[Any]:
    return [pb.Tensor(name, np.ascontiguousarray(value)) for name, value in values.items()]


def from_request(cls: type[T], request: Any) -> T:
    names: tuple[str, ...] = cls._fields  # type: ignore[attr-defined]
    return cls(*(pb.get_input_tensor_by_name(request, name).as_numpy() for name in names))


def from_response(cls: type[T], response: Any) -> T:
    """Return a named tuple of copies."""
    values = []
    for name, kind in cls.__annotations__.items():
        array = pb.get_output_tensor_by_name(response, name).as_numpy()
        values.append(array.item() if kind is float else array.copy())
    return cls(*values)


def parameters(request: Any) -> dict[str, Any]:
    """Return a request's parameters, parsed anew each time."""
    return dict(json.loads(request.parameters() or "{}"))


def named(request: Any, given: Mapping[str, Any]) -> str:
    """Return a request's id; given: its parameters."""
    return valid_or_new_id(given.get(HEADER), request.request_id())


def check_parameters(given: Mapping[str, Any]) -> None:
    """Raise RequestError for a parameter that Triton made from an unknown field."""
    check_names({k: v for k, v in given.items() if k.lower() not in KNOWN})


def timeout(request: Any, given: Mapping[str, Any]) -> float | None:
    """Return seconds, from Triton's timeout or the parameter that `generate` makes of it."""
    microseconds: Any = request.timeout() or given.get("timeout")
    return microseconds / 1e6 if isinstance(microseconds, int) and microseconds > 0 else None


def inputs(request: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Return copies of a request's input tensors by name; Triton frees them after `execute`."""
    return {tensor.name(): tensor.as_numpy().copy() for tensor in request.inputs()}

"""What a body for Triton must be, before Triton parses it.

Triton 2.51 allocates what a shape asks for before it looks at the data, and recurses as deeply as
the JSON is nested. The body is written anew from what was read here: of two equal names another
parser might take the other one.
"""

import difflib
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from dflash_trt.build.settings import CODED_ERRORS
from dflash_trt.errors import RequestError
from dflash_trt.request_fields import DATATYPES
from dflash_trt.serving.request_id import HEADER, request_id

MAX_DIMENSIONS = 8
WIDTHS = {  # bytes of an element; of BYTES at least: its length comes first
    **dict.fromkeys(("BOOL", "INT8", "UINT8"), 1),
    **dict.fromkeys(("INT16", "UINT16", "FP16", "BF16"), 2),
    **dict.fromkeys(("INT32", "UINT32", "FP32", "BYTES"), 4),
    **dict.fromkeys(("INT64", "UINT64", "FP64"), 8),
}


def _integer(low: int, high: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and low <= value < high


# the fields of `generate`: the model's inputs, and Triton's own; `timeout`: microseconds
FIELDS = {**DATATYPES, "id": "BYTES", "timeout": "UINT64", CODED_ERRORS: "BOOL"}
JSON_TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "BYTES": (lambda value: isinstance(value, str), "a string"),
    "BOOL": (lambda value: isinstance(value, bool), "true or false"),
    "INT32": (_integer(-(2**31), 2**31), "an integer of 32 bits"),
    "UINT64": (_integer(0, 2**64), "an integer from 0 on"),
    "FP32": (lambda value: type(value) in (int, float), "a number"),
}


def checked(
    body: bytes,
    action: str | None,
    json_size: str | None,
    added: Mapping[str, str],
    name: str | None = None,
    *,
    ours: bool = False,
) -> tuple[bytes, int, str]:
    """The body to send on, how much of it is JSON, and the request's id.

    action: `infer`, `generate` or another of a model's; json_size: the header
    Inference-Header-Content-Length; added: parameters that the request gets in any case; name: the
    request id in its header, otherwise it is the body's or a new one, and becomes a parameter too;
    ours: whether the model's inputs are those of `request_fields`.
    Raises RequestError for what Triton should not see.
    """
    try:
        size = len(body) if json_size is None else int(json_size)
        if not 0 <= size <= len(body):
            raise ValueError
    except ValueError:
        raise RequestError(
            "Inference-Header-Content-Length is not the size of the JSON in the body",
            "Give its number of bytes",
        ) from None
    try:
        document = json.loads(body[:size].decode()) if size else {}
        if not isinstance(document, dict):
            raise RequestError("the body is not a JSON object", "Send one")
        name = request_id(name, document.get("id"))
        added = {**added, HEADER: name}
        if action == "infer":
            _check_inputs(document, len(body) - size)
            parameters = document.setdefault("parameters", {})
            if not isinstance(parameters, dict):
                raise RequestError("parameters is not a JSON object", "Send one")
            parameters |= added
        elif size != len(body):
            raise RequestError("this request takes no binary data", "Send JSON only")
        elif action is not None:  # generate makes parameters of what is no input
            if ours:
                _check_fields({k: v for k, v in document.items() if k not in added})
            document |= added
        written = json.dumps(
            document, ensure_ascii=False, allow_nan=False, separators=(",", ":")
        ).encode()
    except RecursionError:
        raise RequestError("the body is nested too deeply", "Send a flatter one") from None
    except ValueError as error:  # no UTF-8, no JSON, or a number that JSON cannot say
        raise RequestError("the body is not JSON", f"Correct it: {error}") from None
    return written + body[size:], len(written), name


def _check_fields(document: dict[str, Any]) -> None:
    """Triton ignores unknown fields, and fails on values of a wrong type."""
    for name, value in document.items():
        if name == "parameters" and isinstance(value, dict):  # Triton takes fields in there, too
            _check_fields(value)
        elif name not in FIELDS:
            near = [each for each in FIELDS if each.startswith(name)]
            near += difflib.get_close_matches(name[:40], FIELDS, 1, 0)
            raise RequestError(f"{name[:40]!r} is no field of this request", f"Is it {near[0]}?")
        else:
            fits, kind = JSON_TYPES[FIELDS[name]]
            if not all(map(fits, value if isinstance(value, list) else [value])):
                raise RequestError(f"{name} is not {kind}", "Correct it")


def _check_inputs(document: dict[str, Any], binary: int) -> None:
    """Each shape must be that of its data, which is in the JSON or in the bytes after it."""
    inputs = document.get("inputs")
    if not isinstance(inputs, list):
        raise RequestError("the request has no list of inputs", "Send inputs")
    for each in inputs:
        if not isinstance(each, dict) or not isinstance(each.get("name"), str):
            raise RequestError("an input is not a JSON object with a name", "Name it")
        name, shape = each["name"][:40], each.get("shape")
        if (
            not isinstance(shape, list)
            or len(shape) > MAX_DIMENSIONS
            or not all(type(size) is int and 0 <= size < 2**31 for size in shape)
        ):
            raise RequestError(f"the shape of {name!r} is not one", "Give a list of sizes")
        parameters = each.get("parameters", {})
        size = parameters.get("binary_data_size") if isinstance(parameters, dict) else None
        if ("data" in each) == (size is not None):
            raise RequestError(
                f"input {name!r} has not one source of data", "Give data or binary_data_size"
            )
        elements = math.prod(shape)
        if "data" in each:
            fits = _count(each["data"]) == elements
        else:
            width = WIDTHS.get(str(each.get("datatype")), 0)
            if type(size) is not int or not 0 <= size <= binary:
                raise RequestError(f"the binary data of {name!r} is not in the body", "Send it")
            binary -= size
            least = width * elements
            fits = least <= size if each["datatype"] == "BYTES" else width > 0 and least == size
        if not fits:
            raise RequestError(
                f"the data of {name!r} is not what its shape {shape} asks for", "Correct one"
            )
    if binary:
        raise RequestError(f"the body has {binary} bytes that no input asks for", "Leave them out")


def _count(data: Any) -> int:
    """Elements of nested lists."""
    return sum(map(_count, data)) if isinstance(data, list) else 1

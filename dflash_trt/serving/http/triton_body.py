"""Bodies of Triton's HTTP: what is passed on is what this server's models use.

Triton 2.51 allocates a shape before it looks at the data, ends with a division by zero where text
is wanted as classes, and takes quadratic time for unknown fields. So each field is looked at here.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dflash_trt.errors import RequestError
from dflash_trt.request_schema import TRITON_PARAMETERS, check_fits, check_names, tensors
from dflash_trt.serving.strict_json import parse_object

MAX_FIELDS = 100  # of a body, and tensors of a list
MAX_DIMENSIONS = 8
FIELDS = {"id", "inputs", "outputs", "parameters"}
INPUT_FIELDS = {"name", "shape", "datatype", "data", "parameters"}
OUTPUT_FIELDS = {"name", "parameters"}
INPUT_PARAMETERS = {"binary_data_size"}
OUTPUT_PARAMETERS = {"binary_data"}
LEAVE_OUT = "Leave it out."


@dataclass(frozen=True)
class Body:
    content: bytes
    json_size: int  # bytes of the JSON at its beginning; binary tensors follow


def infer_body(content: bytes, json_size: int) -> Body:
    """Return the body of `infer`; RequestError names what this server does not use.

    Inputs of `[1, n]`, which clients of tensorrtllm_backend send, become `[n]`. Over gRPC Triton
    refuses such shapes.
    """
    document = _parse(content[:json_size])
    _check_known(document, FIELDS, "")
    _check_id(document.get("id"))
    flattened = False
    for place, tensor in _objects(document, "inputs"):
        _check_known(tensor, INPUT_FIELDS, place)
        _check_known(_parameters(tensor, place), INPUT_PARAMETERS, f"{place}.parameters")
        _check_shape(tensor.get("shape"), place, len(content))
        flattened = _flatten(tensor) or flattened
    for place, tensor in _objects(document, "outputs"):
        _check_known(tensor, OUTPUT_FIELDS, place)
        _check_known(_parameters(tensor, place), OUTPUT_PARAMETERS, f"{place}.parameters")
    parameters = _parameters(document, "")
    _check_known(parameters, TRITON_PARAMETERS, "parameters")
    _check_plain(parameters)
    if not flattened:
        return Body(content, json_size)
    head = json.dumps(document).encode()
    return Body(head + content[json_size:], len(head))


def generate_body(content: bytes, parameters: Mapping[str, str]) -> Body:
    """Return the body of `generate` with more parameters; RequestError names a wrong field."""
    document = _parse(content)
    fields = {name: value for name, value in document.items() if name != "parameters"}
    # Triton reads what is in `parameters` like the fields beside them, as LiteLLM sends them
    for values in (fields, _parameters(document, "")):
        _check_fields(values)
    added: dict[str, Any] = dict(parameters)
    end_id = document.get("end_id")
    if type(end_id) is int and "stop_token_ids" not in document:
        added["stop_token_ids"] = end_id  # as in tensorrtllm_backend
    begin = json.dumps(added).encode()[:-1]
    separator = b"," if document else b""
    whole = begin + separator + content.lstrip()[1:]
    return Body(whole, len(whole))


def _check_fields(fields: Mapping[str, Any]) -> None:
    """Raise RequestError for a field of `generate` that the models do not use, or not so."""
    unknown = fields.keys() - tensors().keys() - TRITON_PARAMETERS
    check_names({name: fields[name] for name in unknown})
    _check_plain({name: fields[name] for name in fields.keys() & TRITON_PARAMETERS})
    _check_id(fields.get("id"))
    for name in fields.keys() & tensors().keys():
        check_fits(name, fields[name])


def json_size_of(stated: str | None, content: bytes) -> int:
    """Return the bytes of JSON that begin a body; stated: as its header says, None: all.

    Raises RequestError if there are not as many.
    """
    if stated is None:
        return len(content)
    if not re.fullmatch("[0-9]{1,9}", stated) or int(stated) > len(content):
        raise RequestError(
            "Inference-Header-Content-Length is not the size of the JSON in the body",
            "Give its number of bytes",
        )
    return int(stated)


def _parse(content: bytes) -> dict[str, Any]:
    document = parse_object(content, object_pairs_hook=_without_twins)
    if len(document) > MAX_FIELDS:
        raise RequestError(f"The body has {len(document)} fields", f"Send at most {MAX_FIELDS}.")
    return document


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object; ValueError for equal names, of which Triton reads another than Python."""
    result = dict(pairs)
    if len(result) == len(pairs):
        return result
    counts = Counter(name for name, _ in pairs)
    [(twin, _)] = counts.most_common(1)
    raise ValueError(f"{twin[:40]!r} is there twice")


def _check_known(fields: Mapping[str, Any], known: Iterable[str], place: str) -> None:
    unknown = fields.keys() - set(known)
    if unknown:
        inside = f" of {place}" if place else ""
        raise RequestError(f"{min(unknown)[:40]!r}{inside} is not used by this server", LEAVE_OUT)


def _check_plain(parameters: Mapping[str, Any]) -> None:
    for name, value in parameters.items():
        if isinstance(value, dict | list):
            raise RequestError(f"{name} is not a plain value", "Send a string or a number.")


def _check_id(name: Any) -> None:
    if name is not None and not isinstance(name, str):
        raise RequestError("id is not a string", "Send one, or leave it out.")


def _objects(document: Mapping[str, Any], name: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the objects of a list in the document, each with its place."""
    items = document.get(name, [])
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise RequestError(f"{name} is not a list of objects", "Send one.")
    if len(items) > MAX_FIELDS:
        raise RequestError(f"{name} has {len(items)} tensors", f"Send at most {MAX_FIELDS}.")
    return [(f"{name}[{index}]", item) for index, item in enumerate(items)]


def _parameters(fields: Mapping[str, Any], place: str) -> dict[str, Any]:
    parameters = fields.get("parameters", {})
    if not isinstance(parameters, dict):
        what = f"{place}.parameters" if place else "parameters"
        raise RequestError(f"{what} is not an object", "Send one, or leave it out.")
    return parameters


def _check_shape(shape: Any, place: str, limit: int) -> None:
    """Raise RequestError for a shape of more elements than `limit`, the bytes of the body."""
    if shape is None:
        return  # Triton says what is missing
    sizes = shape if isinstance(shape, list) else [-1]
    valid = all(type(size) is int and size >= 0 for size in sizes)
    if not valid or len(sizes) > MAX_DIMENSIONS or math.prod(sizes) > limit:
        raise RequestError(
            f"the shape {str(shape)[:40]} of {place} is not what its data hold", "Correct it"
        )


def _flatten(tensor: dict[str, Any]) -> bool:
    """Remove leading ones of a shape in place, and return whether there were any."""
    shape = tensor.get("shape")
    flattened = False
    while shape and len(shape) > 1 and shape[0] == 1:
        del shape[0]
        flattened = True
    return flattened

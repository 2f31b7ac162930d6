"""Tensors of a request by name, metrics of a server by name, and waiting for what must come."""

import json
import re
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import numpy as np
from tritonclient.grpc import InferInput

from dflash_trt.request_schema import ACCEPTED, encode

HOST = "127.0.0.1"
WAIT = 60.0  # seconds in which every request has an answer
NO_STATUS = "NO_STATUS"  # of an error in a gRPC stream: the protocol has room for a message only
DTYPES = {"BYTES": np.object_, "INT32": np.int32, "FP32": np.float32, "BOOL": np.bool_}
KINDS = {str: "BYTES", bool: "BOOL", float: "FP32", int: "INT32"}


def tensors(values: dict[str, Any]) -> list[InferInput]:
    result = []
    for name, value in values.items():
        datatype = KINDS[type(value)]
        tensor = InferInput(name, [1], datatype)
        value = value.encode() if isinstance(value, str) else value
        tensor.set_data_from_numpy(np.array([value], DTYPES[datatype]))
        result.append(tensor)
    return result


def as_tensors(values: dict[str, Any]) -> dict[str, Any]:
    """Return the arrays that the model gets for fields of a request."""
    tensors = {}
    for name, value in values.items():
        datatype, shape, content = encode(name, value)
        if datatype == "BYTES":
            texts = value if isinstance(value, list) and shape[0] == len(value) else [value]
            if not all(isinstance(text, str) for text in texts):
                texts = [json.dumps(value)]
            tensors[name] = np.array([text.encode() for text in texts], object)
        else:
            tensors[name] = np.frombuffer(content, ACCEPTED[datatype].dtype).reshape(shape)
    return tensors


def wait_until(done: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def metric(port: int, name: str) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{HOST}:{port}/metrics", timeout=WAIT) as page:
        text = page.read().decode()
    found = re.findall(rf"^{re.escape(name)}(?:{{(.*)}})? (\S+)$", text, re.M)
    return {labels: float(value) for labels, value in found}

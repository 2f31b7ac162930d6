"""Requests that are wrong in every way, and how they are sent."""

from __future__ import annotations

import json
import struct
import urllib.error
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException

import grpc
from hypothesis import strategies as st
from load import HOST, NO_CONNECTION, NO_STATUS, WAIT
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc

from dflash_trt.build.repository import read_config, templates
from dflash_trt.serving.ports import Ports

Tensor = tuple[str, str, list[int], bytes]  # name, datatype, shape, raw contents

MODELS = ("dflash", "dflash_infer")
CONFIG = read_config(templates() / "dflash" / "config.pbtxt")
INPUTS = {
    each.name: model_config_pb2.DataType.Name(each.data_type).removeprefix("TYPE_")
    for each in CONFIG.input
}
MANY = {each.name for each in CONFIG.input if list(each.dims) == [-1]}
NUMBERS = {
    "BOOL": ("<B", (0, 1, 255)),
    "INT32": ("<i", (0, 1, 2, 3, -1, 65, 2**31 - 1, -(2**31))),
    "UINT64": ("<Q", (0, 1, 2**63 - 1, 2**63, 2**64 - 1)),
    "FP32": ("<f", (0.0, 1.0, -1.0, 1e-45, 3e38, float("nan"), float("inf"), float("-inf"))),
}
DOCUMENTS = (
    *(b"[]", b"{}", b"null", b"1e999", b"NaN", b"[[]]", b"[{}]", b'[{"role": 1}]', b'{"a": [}'),
    *(b'[{"role": "user"}]', b'[{"role": "user", "content": {"a": null}}]', b"[" * 100_000),
)


@dataclass(frozen=True)
class Request:
    """Over gRPC when `tensors` are there, else a body over HTTP."""

    model: str
    stream: bool = False
    tensors: tuple[Tensor, ...] | None = None
    body: bytes = b""
    path: str = ""
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Answer:
    code: str  # "OK", a gRPC status or an HTTP status
    message: str


def text(value: bytes) -> bytes:
    """An element of a BYTES tensor."""
    return struct.pack("<I", len(value)) + value


A: Tensor = ("text_input", "BYTES", [1], text(b"a"))
THREE: Tensor = ("max_tokens", "INT32", [1], struct.pack("<i", 3))

# each is refused, and never reaches the decoding threads
BAD_TENSORS: dict[str, tuple[Tensor, ...]] = {
    "nothing": (),
    "a text that is shorter than it says": (("text_input", "BYTES", [1], text(b"abc")[:-1]), THREE),
    "a text with half a length": (("text_input", "BYTES", [1], b"\x01\x00"), THREE),
    "a text of nothing": (("text_input", "BYTES", [1], b""), THREE),
    "two texts in the place of one": (("text_input", "BYTES", [1], text(b"a") * 2), THREE),
    "a shape of two": (A, ("max_tokens", "INT32", [2], THREE[3] * 2)),
    "no shape": (A, ("max_tokens", "INT32", [], THREE[3])),
    "a negative shape": (A, ("max_tokens", "INT32", [-1], THREE[3])),
    "a shape beyond all memory": (A, ("stop_words", "BYTES", [2**40], text(b"a"))),
    "fewer bytes than numbers": (A, ("max_tokens", "INT32", [1], b"\x03")),
    "another type": (A, ("max_tokens", "INT64", [1], struct.pack("<q", 3))),
    "no type": (A, ("max_tokens", "NUMBER", [1], THREE[3])),
    "an unknown name": (A, THREE, ("tokens", "INT32", [1], THREE[3])),
    "one name twice": (A, A, THREE),
    "no UTF-8": (("text_input", "BYTES", [1], text(b"\xed\xa0\x80")), THREE),
    "too many words": (A, ("stop_words", "BYTES", [100_000], text(b"a") * 100_000)),
    "not a number": (A, ("temperature", "FP32", [1], struct.pack("<f", float("nan")))),
    "deep JSON": (("messages", "BYTES", [1], text(b"[" * 100_000)), THREE),
}


def _well_formed(name: str) -> st.SearchStrategy[Tensor]:
    """An input as the model declares it, with a value at the edge of what there is."""
    datatype = INPUTS[name]
    if name in MANY and datatype == "STRING":
        values = st.lists(st.binary(max_size=8).map(text), max_size=4)
        return values.map(lambda each: (name, "BYTES", [len(each)], b"".join(each)))
    if datatype == "STRING":
        strings = st.sampled_from(DOCUMENTS) | st.text(max_size=40).map(str.encode)
        return (strings | st.binary(max_size=40)).map(lambda each: (name, "BYTES", [1], text(each)))
    form, values = NUMBERS[datatype]
    return st.sampled_from(values).map(lambda each: (name, datatype, [1], struct.pack(form, each)))


well_formed = st.sampled_from(sorted(INPUTS)).flatmap(_well_formed)
ill_formed: st.SearchStrategy[Tensor] = st.tuples(
    st.sampled_from(sorted(INPUTS)) | st.text(max_size=8),
    st.sampled_from(["BYTES", "INT64", "FP16", *NUMBERS]) | st.text(max_size=8),
    st.lists(st.integers(-1, 3) | st.integers(-(2**63), 2**63 - 1), max_size=3),
    st.binary(max_size=32),
)
over_grpc = st.builds(
    lambda road, well, ill, prompt: Request(*road, tensors=(*well, *ill, *([A] if prompt else []))),
    st.sampled_from([("dflash", True), ("dflash_infer", True), ("dflash_infer", False)]),
    st.lists(well_formed, max_size=5),
    st.lists(ill_formed, max_size=1),
    st.booleans(),
)
HOSTILE = {
    "many words": ("stop_words", "BYTES", [30_000], text(b"a") * 30_000),
    "long words": ("bad_words", "BYTES", [64], text(b"ab" * 10_000) * 64),
    "a long prompt": ("text_input", "BYTES", [1], text(b"a" * 2_000_000)),
    "many lists": ("messages", "BYTES", [1], text(b"[" + b"[]," * 500_000 + b"[]]")),
    "many messages": (
        *("messages", "BYTES", [1]),
        text(b"[" + b",".join([b'{"role": "user", "content": "a"}'] * 50_000) + b"]"),
    ),
    "deep JSON": ("chat_template_kwargs", "BYTES", [1], text(b'{"a":' * 100_000)),
    "deep tools": ("tools", "BYTES", [1], text(b"[" * 900 + b"]" * 900)),
}
hostile_over_grpc = over_grpc | st.builds(
    lambda road, well, worst: Request(*road, tensors=(A, *well, worst)),
    st.sampled_from([("dflash", True), ("dflash_infer", True), ("dflash_infer", False)]),
    st.lists(well_formed, max_size=2),
    st.sampled_from(sorted(HOSTILE)).map(HOSTILE.__getitem__),
)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
documents = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
named = st.dictionaries(st.sampled_from(sorted(INPUTS)), documents, max_size=5)
listed = st.fixed_dictionaries(
    {
        "inputs": st.lists(
            st.fixed_dictionaries(
                {"name": st.sampled_from(sorted(INPUTS)) | documents},
                optional={
                    "shape": st.just([1]) | documents,
                    "datatype": st.sampled_from(["BYTES", *NUMBERS]) | documents,
                    "data": documents,
                    "parameters": documents,
                },
            ),
            max_size=3,
        )
    }
)
bodies = (named | listed | documents).map(lambda each: json.dumps(each).encode())
over_http = st.builds(
    Request,
    model=st.sampled_from(MODELS),
    body=bodies | st.binary(max_size=64),
    path=st.sampled_from(["generate", "generate_stream", "infer"]),
    headers=st.just(())
    | st.sampled_from(["0", "5", "-1", "x", "9" * 30]).map(
        lambda each: (("Inference-Header-Content-Length", each),)
    ),
)
requests = over_grpc | over_http


def send(request: Request, ports: Ports, stub: service_pb2_grpc.GRPCInferenceServiceStub) -> Answer:
    """Sends it and waits for all that comes back; TimeoutError when nothing does."""
    return _send_http(request, ports) if request.tensors is None else _send_grpc(request, stub)


def _send_grpc(request: Request, stub: service_pb2_grpc.GRPCInferenceServiceStub) -> Answer:
    message = service_pb2.ModelInferRequest(model_name=request.model)
    for name, datatype, shape, raw in request.tensors or ():
        message.inputs.add(name=name, datatype=datatype, shape=shape)
        message.raw_input_contents.append(raw)
    try:
        if not request.stream:
            stub.ModelInfer(message, timeout=WAIT)
            return Answer("OK", "")
        responses = stub.ModelStreamInfer(iter([message]), timeout=WAIT)
        errors = [each.error_message for each in responses if each.error_message]
        return Answer(NO_STATUS, errors[0]) if errors else Answer("OK", "")
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise TimeoutError(request) from None
        return Answer(error.code().name, error.details())


def _send_http(request: Request, ports: Ports) -> Answer:
    url = f"http://{HOST}:{ports.http}/v2/models/{request.model}/{request.path}"
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, request.body, dict(request.headers)), timeout=WAIT
        ) as response:
            return Answer("OK", response.read().decode())
    except urllib.error.HTTPError as error:
        return Answer(str(error.code), error.read().decode())
    except TimeoutError:
        raise TimeoutError(request) from None
    except (OSError, HTTPException) as error:
        if isinstance(getattr(error, "reason", None), TimeoutError):
            raise TimeoutError(request) from None
        return Answer(NO_CONNECTION, str(error))

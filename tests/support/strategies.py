"""What clients send and users hand in, sound and spoilt, as hypothesis strategies.

`mutate` and `spoil` change a sound value or file in a place; `over_grpc` and `hostile_over_grpc`
are what a server is asked.
"""

import json
import random
import struct
from dataclasses import dataclass
from typing import Any

import grpc
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc

from dflash_trt.builder.repository import TEMPLATES, read_config
from tests.support.request_tools import NO_STATUS, WAIT

Json = Any
Files = dict[str, bytes]
EACH_ONCE = settings(  # a property over many inputs, none of them shrunk
    database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)

DEEP = "[" * 3000 + "]" * 3000  # stands for "DEEP"
LONG = "9" * 5000  # stands for "LONG", without quotes a number that Python does not read
WHOLE: tuple[Json, ...] = (
    *(0, 1, -1, 2, 3, 7, 16, 64, 10**9, -(10**9), 2**31, 2**40, 2**63 - 1, 2**63, 2**64 - 1),
    *(2**64, 10**30, 10**400, True, False),
)
JUNK: tuple[Json, ...] = (
    *(None, *WHOLE, 0.0, 0.5, 1.5, 16.0, -1.0, 1e308, -1e308, 1e-320),
    *map(float, ("nan", "inf", "-inf")),
    *("", "0", "a", "x", "\0", "\ud800", "é🙂" * 300, "x" * 10000, "\x1b[2J", "DEEP", "LONG"),
    *(".", "..", "../a", "/", "/a", "a/b", "model.safetensors", "F32", "F4", "U8", "C64"),
    *([], {}, [[]], [None], {"": None}, {"a": {}}, {"a": 1}, [0], [-1], [1.0], ["1"], ["x"]),
    *([1, 2], [2, 1], [0, 0], [0, 64], [64, 0], [10**9], [1] * 2000, {"rope_theta": 1}),
    *([0, 2**63], [2**32, 2**32], [1] * 70, {"dtype": "F32"}, {"quant_method": "fp8"}),
)
NAMES = ("", "a", "\0", "x" * 3000, "\ud800", "quantization_config", "text_config", "__metadata__")


def mutate(value: Json, dice: random.Random) -> Json:
    """Return a copy with one place replaced, removed, swapped, wrapped or added."""
    value = json.loads(json.dumps(value))
    places: list[tuple[Any, Any]] = []

    def walk(node: Json) -> None:
        for key in list(node) if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], dict | list):
                walk(node[key])

    walk(value)
    how = dice.choice([*["replace"] * 4, "count", "remove", "swap", "wrap", "add", "top"])
    if not places or (how == "top" and dice.random() < 0.5):
        return dice.choice(JUNK)
    node, key = dice.choice(places)
    if how == "count":
        numbers = [at for at in places if type(at[0][at[1]]) is int]
        node, key = dice.choice(numbers or places)
        node[key] = dice.choice(WHOLE)
    elif how == "remove":
        del node[key]
    elif how == "swap":
        other, there = dice.choice(places)
        node[key], other[there] = other[there], node[key]
    elif how == "wrap":
        node[key] = list(node[key].values()) if isinstance(node[key], dict) else [node[key]]
    elif how == "add" and isinstance(node, dict):
        node[dice.choice(NAMES)] = dice.choice(JUNK)
    elif how == "add":
        node.append(dice.choice(JUNK))
    else:
        node[key] = dice.choice(JUNK)
    try:
        return json.loads(json.dumps(value))  # junk is not shared
    except (ValueError, RecursionError):  # swapped into itself
        return dice.choice(JUNK)


def text_of(value: Json) -> bytes:
    return json.dumps(value).replace('"DEEP"', DEEP).replace('"LONG"', LONG).encode()


def spoil(data: bytes, dice: random.Random) -> bytes:
    """Change, cut off, insert or repeat bytes."""
    at, raw = dice.randrange(len(data) + 1), bytearray(data)
    how = dice.choice(["cut", "flip", "insert", "repeat", "letter"])
    if how == "cut":
        return bytes(raw[:at])
    if how == "flip" and at < len(raw):
        raw[at] ^= 1 << dice.randrange(8)
    elif how == "insert":
        junk = (b"\0", b"\xff", b"\xed\xa0\x80", b"[" * 5000, b'{"a":', b"9" * 5000, b"\n", b'"')
        raw[at:at] = dice.choice(junk)
    elif how == "repeat":
        raw[at:at] = raw[dice.randrange(at + 1) : at]
    elif at < len(raw):
        raw[at] = dice.choice(b'{}[]",:0-9.eE \\ntf')
    return bytes(raw)


def spoil_json(data: bytes, dice: random.Random) -> bytes:
    if dice.random() < 0.2:
        return spoil(data, dice)
    value = json.loads(data)
    for _ in range(dice.choice([1, 1, 2, 4])):
        value = mutate(value, dice) if isinstance(value, dict | list) else value
    return text_of(value)


DICE = st.randoms(use_true_random=True)

Tensor = tuple[str, str, list[int], bytes]  # name, datatype, shape, raw contents

CONFIG = read_config(TEMPLATES / "dflash" / "config.pbtxt")
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
    model: str
    stream: bool
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True)
class Answer:
    code: str  # "OK", a gRPC status
    message: str


def text(value: bytes) -> bytes:
    return struct.pack("<I", len(value)) + value


A: Tensor = ("text_input", "BYTES", [1], text(b"a"))
THREE: Tensor = ("max_tokens", "INT32", [1], struct.pack("<i", 3))


def _well_formed(name: str) -> st.SearchStrategy[Tensor]:
    """Return an input as the model declares it, with an extreme value."""
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


def send(request: Request, stub: service_pb2_grpc.GRPCInferenceServiceStub) -> Answer:
    """Send it and wait for all that comes back; TimeoutError if nothing does."""
    message = service_pb2.ModelInferRequest(model_name=request.model)
    for name, datatype, shape, raw in request.tensors:
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

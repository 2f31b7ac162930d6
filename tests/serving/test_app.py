"""The application's process over a fake Triton: what it lets through, and to whom."""

import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from dflash_trt.serving.http.guard import BODY_LIMIT, BODY_TIME
from dflash_trt.serving.ports import Ports
from dflash_trt.serving.security import KEY_HEADER, OWN_KEY_HEADER, Security
from dflash_trt.serving.tracing import HEADER
from tests.standins.triton_http import FakeTriton, fake_triton
from tests.support.processes import command_line, processes_naming
from tests.support.servers import openai_front

WAIT = 60.0
KEY = "inference-0123456789"
INFER, STREAM = "models/dflash_infer/infer", "models/dflash/generate_stream"
GENERATE = "models/dflash/generate"
OK = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["a"]}


@dataclass
class Door:
    triton: FakeTriton
    security: Security
    address: str

    @property
    def url(self) -> str:
        return f"{self.address}/v2"

    def post(self, path: str, body: Any = None, **headers: str) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        return httpx.post(f"{self.url}/{path}", content=content, headers=names, timeout=WAIT)

    def get(self, path: str, **headers: str) -> int:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        return httpx.get(f"{self.url}/{path}", headers=names, timeout=WAIT).status_code

    def connect(self, sent: bytes = b"") -> socket.socket:
        address = httpx.URL(self.address)
        connection = socket.create_connection((address.host, address.port), timeout=WAIT)
        connection.sendall(sent)
        return connection


def start(stack: ExitStack, built: Path, security: Security | None = None) -> Door:
    triton, security = stack.enter_context(fake_triton()), security or Security()
    front = openai_front(built, Ports(triton.port, 1, 1), security)
    return Door(triton, security, stack.enter_context(front))


@pytest.fixture(scope="module")
def shared(built: Path) -> Iterator[Door]:
    with ExitStack() as stack:
        yield start(stack, built)


@pytest.fixture
def door(shared: Door) -> Door:
    shared.triton.seen.clear()
    shared.triton.cancelled.clear()
    shared.triton.go.set()
    return shared


BAD: dict[str, Any] = {
    "nothing": b"",
    "no JSON": b"{",
    "no object": b"[]",
    "no UTF-8": b'{"inputs": "\xff"}',
    "another encoding": '{"text_input": "a"}'.encode("utf-16"),
    "beyond all memory": {"inputs": [{**OK, "shape": [1 << 40], "datatype": "FP32", "data": [1]}]},
    "a large product": {"inputs": [{**OK, "shape": [1 << 30] * 4}]},
    "equal names": b'{"inputs": [{"name": "a", "data": [1], "shape": [9999], "shape": [1]}]}',
    "another spelling": b'{"inputs": [{"name": "a", "data": [1], "sh\\u0061pe": [9999]}]}',
    "a negative size": {"inputs": [{**OK, "shape": [-1]}]},
    "a size of a half": {"inputs": [{**OK, "shape": [0.5]}]},
    "a size of true": {"inputs": [{**OK, "shape": [True]}]},
    "too many dimensions": {"inputs": [{**OK, "shape": [1] * 1000}]},
    "deep": b'{"inputs": [{"name": "a", "shape": [1], "data": ' + b"[" * 500_000,
    "deep and whole": b'{"inputs": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_body_does_not_reach_triton(door: Door, name: str) -> None:
    answer = door.post(INFER, BAD[name])
    assert answer.status_code == 400
    assert set(answer.json()) == {"error"}
    assert door.triton.seen == []


@pytest.mark.parametrize("length", ["-1", "x", "9" * 30, "9" * 5000, "99"])
def test_a_length_of_the_json_that_is_none(door: Door, length: str) -> None:
    answer = door.post(INFER, {"inputs": [OK]}, inference_header_content_length=length)
    assert (answer.status_code, "Inference-Header" in answer.json()["error"]) == (400, True)
    assert door.triton.seen == []


def test_what_triton_gets(door: Door) -> None:
    infer = json.dumps({"inputs": [OK], "parameters": {"timeout": 5}}).encode()
    lies = {OWN_KEY_HEADER.replace("-", "_"): "guess", "client": "somebody", "client_key": "x"}
    known = {"x_request_id": "r1"}
    assert door.post(INFER, infer, **lies, **known).json() == {"done": True}
    asked = door.post(GENERATE, {"text_input": "é"}, traceparent="00-1", **known)
    assert asked.status_code == 200
    (path, headers, body), (_, traced, generate) = door.triton.seen
    assert (path, body) == (f"/v2/{INFER}", infer)
    who = {"client": "127.0.0.1", "client-key": door.security.client_key, HEADER: "r1"}
    assert headers.items() >= {OWN_KEY_HEADER: door.security.own_key, **who}.items()
    assert int(headers["content-length"]) == len(body)
    assert json.loads(generate) == {"text_input": "é", **who}
    assert generate.endswith(b'"text_input": "\\u00e9"}')
    assert traced["traceparent"] == "00-1"


def test_fields_of_tensorrtllm_backend(door: Door) -> None:
    asked = {"text_input": "a", "bad_words": "", "stop_words": "", "pad_id": 2, "end_id": 2}
    assert door.post(GENERATE, asked).status_code == 200
    assert door.post(GENERATE, {**asked, "stop_token_ids": [3]}).status_code == 200
    first, second = (json.loads(body) for _, _, body in door.triton.seen)
    assert (first["stop_token_ids"], second["stop_token_ids"]) == (2, [3])


def test_a_request_keeps_its_id(door: Door) -> None:
    """Without a valid id in its header it gets a new one."""

    def id_of(**headers: str) -> str:
        """Return the id in the answer, which must be the one that Triton got."""
        door.triton.seen.clear()
        answer = door.post(INFER, {"inputs": [OK]}, **headers)
        assert door.triton.seen[0][1][HEADER] == answer.headers[HEADER]
        return answer.headers[HEADER]

    assert id_of(x_request_id="a-1/b") == "a-1/b"
    made = [id_of(x_request_id=bad) for bad in ("", "a b", "x" * 129)]
    assert all(re.fullmatch("[0-9a-f]{32}", name) for name in made)
    refused = door.post("models/draft/infer", {}, x_request_id="refused-1")
    assert (refused.status_code, refused.headers[HEADER]) == (404, "refused-1")


WANTED = {"inputs": [OK], "outputs": [{"name": "text_output"}]}
UNUSED: dict[str, tuple[dict[str, Any], str]] = {
    "classes": (
        {**WANTED, "outputs": [{"name": "text_output", "parameters": {"classification": 1}}]},
        "'classification' of outputs[0].parameters",
    ),
    "shared memory": (
        {"inputs": [{**OK, "parameters": {"shared_memory_region": "x"}}]},
        "'shared_memory_region' of inputs[0].parameters",
    ),
    "an unknown field": ({**WANTED, "nonsense": 1}, "'nonsense' is not used"),
    "a field of an input": ({"inputs": [{**OK, "content": 1}]}, "'content' of inputs[0]"),
    "a parameter": ({**WANTED, "parameters": {"nonsense": 1}}, "'nonsense' of parameters"),
    "a nested parameter": ({**WANTED, "parameters": {"timeout": {}}}, "timeout is not a plain"),
    "no list": ({"inputs": {}}, "inputs is not a list"),
    "no object": ({"inputs": [5]}, "inputs is not a list of objects"),
    "parameters of no kind": ({**WANTED, "parameters": []}, "parameters is not an object"),
    "an id": ({**WANTED, "id": 5}, "id is not a string"),
    "tensors": ({"inputs": [OK] * 101}, "inputs has 101 tensors"),
    "half a character": ({**WANTED, "id": "\ud800"}, "id holds half a character"),
}


@pytest.mark.parametrize("name", UNUSED)
def test_what_the_models_do_not_use_does_not_reach_triton(door: Door, name: str) -> None:
    body, words = UNUSED[name]
    answer = door.post(INFER, json.dumps(body).encode())
    assert (answer.status_code, words in answer.json()["error"]) == (400, True), answer.text
    assert door.triton.seen == []


@pytest.mark.parametrize("text", ['{"id": 1e999}', '{"max_tokens": NaN}', '{"a": 1, "a": 2}'])
@pytest.mark.parametrize("path", [INFER, GENERATE])
def test_a_body_that_triton_would_answer_with_a_500(door: Door, path: str, text: str) -> None:
    assert door.post(path, text.encode()).status_code == 400
    assert door.triton.seen == []


@pytest.mark.parametrize("path", [INFER, GENERATE])
def test_a_name_that_is_there_twice_is_refused(door: Door, path: str) -> None:
    """Triton reads the first of them, and Python the last."""
    inputs = json.dumps({"inputs": [OK]} if path == INFER else {"text_input": "a"})
    assert door.post(path, inputs.encode()).status_code == 200
    answer = door.post(path, inputs.replace("{", '{"id": "1", "id": "2", ', 1).encode())
    assert (answer.status_code, "'id' is there twice" in answer.json()["error"]) == (400, True)
    assert len(door.triton.seen) == 1


def test_generate_takes_its_fields_and_no_others(door: Door) -> None:
    sent = {"text_input": "a", "id": "x", "timeout": 1_000_000, "beam_width": 1, "n": 1}
    assert door.post(GENERATE, sent).status_code == 200
    assert door.post(GENERATE, {**sent, "parameters": {"temperature": 0.5}}).status_code == 200
    wrong: list[dict[str, Any]] = [{"parameters": {"nonsense": 1}}, {"parameters": 5}]
    wrong += [{"client": "x"}, {"client-key": "x"}, {"nonsense": 1}, {"timeout": []}, {"id": 1}]
    for more in wrong:
        answer = door.post(GENERATE, {**sent, **more})
        name = "nonsense" if "nonsense" in str(more) else next(iter(more))
        assert (answer.status_code, name in answer.json()["error"]) == (400, True)
    many = {str(number): 1 for number in range(150_000)}
    answer = door.post(GENERATE, many)
    assert (answer.status_code, "150000 fields" in answer.json()["error"]) == (400, True)
    assert len(door.triton.seen) == 2


def test_what_clients_of_triton_send_goes_through(door: Door) -> None:
    """As tritonclient.http writes them."""
    binary = {**OK, "parameters": {"binary_data_size": 5}}
    del binary["data"]
    outputs = [{"name": "text_output", "parameters": {"binary_data": True}}]
    parameters = {"timeout": 5, "priority": 1, "binary_data_output": True}
    document = {"id": "1", "inputs": [binary], "outputs": outputs, "parameters": parameters}
    head = json.dumps(document).encode()
    length = {"inference_header_content_length": str(len(head))}
    assert door.post(INFER, head + b"\1\0\0\0a", **length).status_code == 200
    assert door.triton.seen[0][2] == head + b"\1\0\0\0a"


def test_headers_that_cannot_be_carried_on_are_left_out(door: Door) -> None:
    body = json.dumps({"inputs": [OK]}).encode()
    for name, value in (
        ("content-type", "application/json; x=\xff"),
        ("traceparent", "\xe9"),
        ("tracestate", "a" * 32_000),
    ):
        door.triton.seen.clear()
        headers = {name: value.encode("latin-1")}
        answer = httpx.post(f"{door.url}/{INFER}", content=body, headers=headers, timeout=WAIT)
        assert answer.status_code == 200, name
        assert name not in door.triton.seen[0][1]


def test_another_model_is_named(door: Door) -> None:
    answer = door.post("models/verify/infer", {"inputs": [OK]})
    assert (answer.status_code, "'verify'" in answer.json()["error"]) == (404, True)


def test_a_chunked_body_gets_a_length(door: Door) -> None:
    pieces = iter([b'{"text_input"', b': "a"}'])
    assert httpx.post(f"{door.url}/{GENERATE}", content=pieces, timeout=WAIT).status_code == 200
    _, headers, body = door.triton.seen[0]
    assert json.loads(body)["text_input"] == "a"
    assert "transfer-encoding" not in headers


def test_only_public_routes_reach_triton(door: Door) -> None:
    for path in ("", "models/dflash", "models/dflash/versions/1/config", "models/dflash/stats"):
        assert door.get(path) == 200
    for path in (
        *("none", "models/a/b", "models/a%2f..%2fb", "repository/index", "models/dflash/../verify"),
        *("models/verify", "models/verify/config", "models/draft/ready", "logging", "models/stats"),
    ):
        assert door.get(path) == 404
    for path in (
        *("repository/models/x/load", "systemsharedmemory/region/x/register", "trace/setting"),
        *("repository/models/verify/unload", "logging"),
        *(f"models/{model}/infer" for model in ("verify", "draft", "draft_verify")),
        "models/verify/versions/1/infer",
    ):
        assert door.post(path, {"inputs": [OK]}).status_code == 404
    wrong = httpx.get(f"{door.url}/{INFER}")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert door.post(INFER, {"inputs": [OK]}, content_encoding="gzip").status_code == 415
    assert door.triton.seen == []


def test_the_key(built: Path) -> None:
    """Either header works for both APIs, and health needs no key."""
    security = Security(keys=(KEY,))
    with ExitStack() as stack:
        door = start(stack, built, security)
        door.triton.go.set()
        bearers = ({"authorization": f"{word} {KEY}"} for word in ("Bearer", "bearer"))
        good = ({KEY_HEADER: KEY}, *bearers)
        bad = ({}, {KEY_HEADER: "guess"}, {"authorization": f"Basic {KEY}"}, {"authorization": KEY})
        for headers, status in (*((each, 200) for each in good), *((each, 401) for each in bad)):
            given = {name.replace("-", "_"): value for name, value in headers.items()}
            for path, body in ((INFER, {"inputs": [OK]}), (GENERATE, {"text_input": "a"})):
                answer = door.post(path, body, **given)
                assert answer.status_code == status
                challenge = None if status == 200 else "Bearer"
                assert answer.headers.get("www-authenticate") == challenge
            for path, found in (("v1/models", 200), ("v1/nothing", 404), ("nothing", 404)):
                answer = httpx.get(f"{door.address}/{path}", headers=headers)
                assert answer.status_code == (found if status == 200 else status), path
        assert door.get("health/ready") == door.get("models/dflash") == 200
        lines = [" ".join(command_line(pid)) for pid in processes_naming("dflash_trt.serving.http")]
        assert lines
        secrets = (KEY, security.own_key)
        assert not any(secret in line for line in lines for secret in secrets)


def test_a_stream_flows_and_ends_with_its_client(door: Door) -> None:
    with httpx.stream("POST", f"{door.url}/{STREAM}", json={"text_input": "a"}) as answer:
        lines = answer.iter_lines()
        assert [next(lines) for _ in range(3)] == ['data: {"number": 0}', "", 'data: {"number": 1}']
        assert not door.triton.cancelled.is_set()
    assert door.triton.cancelled.wait(WAIT), "the stream goes on"


def test_large_bodies(door: Door) -> None:
    just = json.dumps({"text_input": "a" * (BODY_LIMIT - 100)}).encode()
    assert door.post(GENERATE, just).status_code == 200
    headers = {"Content-Type": "application/json"}
    for path in (f"v2/{GENERATE}", "v1/completions"):
        for content in (just + b" " * 200, (b" " * 100_000 for _ in range(1000))):
            answer = httpx.post(f"{door.address}/{path}", content=content, headers=headers)
            assert (answer.status_code, str(BODY_LIMIT) in answer.text) == (413, True)
    assert len(door.triton.seen) == 1


@pytest.mark.models
def test_half_a_body_is_closed(door: Door) -> None:
    head = f"POST /v2/{GENERATE} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\n"
    with door.connect(head.encode() + b"{") as connection:
        begun = time.monotonic()
        answer = connection.recv(9999)
        while connection.recv(9999):
            pass
        assert 0.5 * BODY_TIME < time.monotonic() - begun < WAIT
    assert b" 408 " in answer


@pytest.mark.parametrize(
    ("shape", "expected"),
    [([1, 1], [1]), ([1, 2], [2]), ([1, 1, 1], [1]), ([1], [1]), ([2, 1], [2, 1]), ([], [])],
)
def test_a_leading_one_of_a_shape_goes(door: Door, shape: list[int], expected: list[int]) -> None:
    """tensorrtllm_backend's models have batches, so its clients send one."""
    values = [{**OK, "shape": shape}, {"name": "stop_words", "shape": [1, 1]}]
    head = json.dumps({"inputs": values, "id": "é"}).encode()
    length = {"inference_header_content_length": str(len(head))}
    for rest, headers in ((b"", {}), (b"\1\0\0\0a", length)):
        door.triton.seen.clear()
        assert door.post(INFER, head + rest, **headers).status_code == 200
        [(_, sent, body)] = door.triton.seen
        size = int(sent.get("inference-header-content-length", len(body)))
        document = json.loads(body[:size])
        assert [each["shape"] for each in document["inputs"]] == [expected, [1]]
        assert (document["id"], body[size:]) == ("é", rest)

"""The gateway's process over a fake Triton: what it lets through, and to whom."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from dflash_trt.serving.gateway.checks import checked
from dflash_trt.serving.gateway.connections import HEADER_TIME, MAX_PIECES
from dflash_trt.serving.gateway.door import BODY_LIMIT, BODY_TIME
from fake_triton import fake_triton
from gateway_door import GENERATE, INFER, OK, STREAM, WAIT, Door, start

from dflash_trt.errors import RequestError
from dflash_trt.serving.ports import free_ports
from dflash_trt.serving.request_id import HEADER
from dflash_trt.serving.security import GATEWAY_KEY, Security

KEY, ADMIN_KEY = "inference-0123456789", "admin-0123456789"


@pytest.fixture(scope="module")
def shared() -> Iterator[Door]:
    with ExitStack() as stack:
        yield start(stack)


@pytest.fixture
def door(shared: Door) -> Door:
    shared.triton.seen.clear()
    shared.triton.cancelled.clear()
    shared.triton.go.set()
    return shared


def post_bytes(path: str, body: bytes) -> bytes:
    head = f"POST /v2/{path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


BAD: dict[str, Any] = {
    "nothing": b"",
    "no JSON": b"{",
    "no object": [],
    "no UTF-8": b'{"inputs": "\xff"}',
    "half a character": b'{"inputs": [], "id": "\\ud800"}',
    "not a number": b'{"inputs": [], "x": NaN}',
    "more than a number": b'{"inputs": [], "x": 1e999}',
    "no inputs": {"text_input": "a"},
    "inputs of another type": {"inputs": {"a": 1}},
    "no name": {"inputs": [{**OK, "name": 5}]},
    "beyond all memory": {"inputs": [{**OK, "shape": [1 << 40], "datatype": "FP32", "data": [1]}]},
    "a large product": {"inputs": [{**OK, "shape": [1 << 30] * 4}]},
    "equal names": b'{"inputs": [{"name": "a", "data": [1], "shape": [1], "shape": [9]}]}',
    "a negative size": {"inputs": [{**OK, "shape": [-1]}]},
    "a size of a half": {"inputs": [{**OK, "shape": [0.5]}]},
    "a size of true": {"inputs": [{**OK, "shape": [True]}]},
    "too many dimensions": {"inputs": [{**OK, "shape": [1] * 1000}]},
    "no shape": {"inputs": [{"name": "text_input", "datatype": "BYTES", "data": ["a"]}]},
    "less data": {"inputs": [{**OK, "shape": [2]}]},
    "no data": {"inputs": [{"name": "text_input", "shape": [1], "datatype": "BYTES"}]},
    "bytes that are not there": {
        "inputs": [{"name": "a", "shape": [1], "parameters": {"binary_data_size": 4}}]
    },
    "parameters of another type": {"inputs": [OK], "parameters": [1]},
    "deep": b'{"inputs": [{"name": "a", "shape": [1], "data": ' + b"[" * 500_000,
    "deep and whole": b'{"inputs": ' + b"[" * 400_000 + b"]" * 400_000 + b"}",
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_body_does_not_reach_triton(door: Door, name: str) -> None:
    answer = door.post(INFER, BAD[name])
    assert answer.status_code == 400
    assert set(answer.json()) == {"error"}
    assert door.triton.seen == []


def test_bad_binary_tensors() -> None:
    def check(shape: list[int], datatype: str, binary: bytes, size: int | None = None) -> bytes:
        parameters = {"binary_data_size": len(binary) if size is None else size}
        each = {"name": "a", "shape": shape, "datatype": datatype, "parameters": parameters}
        head = json.dumps({"inputs": [each]}).encode()
        body, length, _ = checked(head + binary, "infer", str(len(head)), {})
        return body[length:]

    assert check([2], "INT32", b"12345678") == b"12345678"
    assert check([1], "BYTES", b"\1\0\0\0a") == b"\1\0\0\0a"
    for arguments in (
        ([3], "INT32", b"12345678"),
        ([1 << 30], "BYTES", b"\1\0\0\0a"),
        ([1], "NUMBER", b"1234"),
        ([1], "INT32", b"12345678", 4),  # bytes that nobody asks for
        ([1], "INT32", b"1234", 8),
        ([1], "INT32", b"1234", -4),
    ):
        with pytest.raises(RequestError):
            check(*arguments)  # type: ignore[arg-type]
    for length in ("-1", "x", "9" * 30, "\N{SUPERSCRIPT TWO}"):
        with pytest.raises(RequestError, match="Inference-Header-Content-Length"):
            checked(b"{}", "infer", length, {})


def test_what_triton_gets(door: Door) -> None:
    """Its own key, who asks, a length; nothing of what a client might say in their place."""
    forged = {"client": "somebody", "client_key": "guess"}
    infer = {"inputs": [OK], "parameters": {"timeout": 5, **forged}}
    lies = {GATEWAY_KEY.replace("-", "_"): "guess", "x_forwarded_for": "1.2.3.4"}
    known = {"x_request_id": "r1"}
    assert door.post(INFER, infer, **lies, **known).json() == {"done": True}
    asked = door.post(GENERATE, {"text_input": "é", **forged}, traceparent="00-1", **known)
    assert asked.status_code == 200
    (path, headers, body), (_, traced, generate) = door.triton.seen
    assert path == f"/v2/{INFER}"
    assert headers[GATEWAY_KEY] == door.security.own_key
    assert int(headers["content-length"]) == len(body)
    assert headers.keys() <= {"host", GATEWAY_KEY, "content-length", "content-type"}
    who = {"client": "127.0.0.1", "client_key": door.security.client_key, HEADER: "r1"}
    assert json.loads(body) == {"inputs": [OK], "parameters": {"timeout": 5, **who}}
    assert json.loads(generate) == {"text_input": "é", **who}
    assert traced["traceparent"] == "00-1"


def test_a_request_keeps_its_id(door: Door) -> None:
    """That of its header, else of its body, else one of ours; what may not stand in a log goes."""

    def ids(path: str, body: Any, **headers: str) -> set[str]:
        """In the answer and as Triton has it."""
        door.triton.seen.clear()
        answer = door.post(path, body, **headers)
        sent = json.loads(door.triton.seen[0][2])
        return {answer.headers[HEADER], sent.get("parameters", sent)[HEADER]}

    infer = {"inputs": [OK], "id": "of-the-body"}
    assert ids(INFER, infer, x_request_id="a-1/b") == {"a-1/b"}
    assert ids(INFER, infer) == {"of-the-body"}
    assert ids(GENERATE, {"text_input": "a", "id": "x"}) == {"x"}
    made = [ids(GENERATE, {"text_input": "a"}, x_request_id=bad) for bad in ("", "a b", "x" * 129)]
    made.append(ids(INFER, {"inputs": [OK], "id": "a\nb"}))
    assert [len(each) for each in made] == [1] * 4
    assert all(re.fullmatch("[0-9a-f]{32}", name) for each in made for name in each)
    refused = door.post("models/draft/infer", {}, x_request_id="refused-1")
    assert (refused.status_code, refused.headers[HEADER]) == (403, "refused-1")


def test_a_chunked_body_gets_a_length(door: Door) -> None:
    pieces = iter([b'{"text_input"', b': "a"}'])
    answer = httpx.post(f"{door.url}/{GENERATE}", content=pieces, timeout=WAIT)
    assert answer.status_code == 200
    _, headers, body = door.triton.seen[0]
    assert json.loads(body)["text_input"] == "a"
    assert "transfer-encoding" not in headers


def test_routes(door: Door) -> None:
    for path in ("", "models/dflash", "models/dflash/versions/1/config", "models/stats"):
        assert door.get(path) == 200
    for path in ("none", "models/a/b", "models/a%2f..%2fb", "repository/models/x/load"):
        assert door.get(path) in (404, 405)
    assert httpx.get(f"http://127.0.0.1:{door.port}/metrics").status_code == 404
    assert door.get(INFER) == 405
    for model in ("verify", "draft", "draft_verify", "verify/versions/1"):
        answer = door.post(f"models/{model}/infer", {"inputs": [OK]})
        assert (answer.status_code, "internal" in answer.json()["error"]) == (403, True)
    assert door.post(INFER, {"inputs": [OK]}, content_encoding="gzip").status_code == 415
    assert door.triton.seen == []


def test_the_keys() -> None:
    security = Security(inference_key=KEY, admin_key=ADMIN_KEY)
    with ExitStack() as stack:
        door = start(stack, security)
        door.triton.go.set()
        for key, status in (("", 403), ("guess", 403), (KEY, 200)):
            given = {"inference_key": key}
            for path, body in ((INFER, {"inputs": [OK]}), (GENERATE, {"text_input": "a"})):
                assert door.post(path, body, **given).status_code == status
        for key, status in (("", 403), (KEY, 403), (ADMIN_KEY, 200)):
            given = {"admin_key": key}
            for path in ("models/dflash/config", "models/stats", "logging"):
                assert door.get(path, **given) == status
            assert door.post("repository/index", **given).status_code == status
        assert door.get("health/ready") == door.get("models/dflash") == 200
        command = Path(f"/proc/{door.gateway._process.pid}/cmdline").read_text()  # type: ignore[union-attr]
        assert not any(secret in command for secret in (KEY, ADMIN_KEY, security.own_key))


def test_a_stream_flows_and_ends_with_its_client(door: Door) -> None:
    with httpx.stream("POST", f"{door.url}/{STREAM}", json={"text_input": "a"}) as answer:
        lines = answer.iter_lines()
        assert [next(lines) for _ in range(3)] == ['data: {"number": 0}', "", 'data: {"number": 1}']
        assert not door.triton.cancelled.is_set()
    assert door.triton.cancelled.wait(WAIT), "the stream goes on"


def test_large_bodies(door: Door) -> None:
    just = json.dumps({"text_input": "a" * (BODY_LIMIT - 100)}).encode()
    assert door.post(GENERATE, just).status_code == 200
    answer = door.post(GENERATE, just + b" " * 200)
    assert (answer.status_code, str(BODY_LIMIT) in answer.json()["error"]) == (413, True)
    assert len(door.triton.seen) == 1


def test_a_flood_of_chunks_is_refused_early(door: Door) -> None:
    head = f"POST /v2/{GENERATE} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    with door.connect(head.encode()) as connection:
        begun = time.monotonic()
        sent = 0
        try:
            while sent < 1_000_000:
                connection.sendall(b"1\r\na\r\n" * 1000)
                sent += 1000
        except OSError:
            pass  # closed
    assert sent < 100 * MAX_PIECES
    assert time.monotonic() - begun < WAIT
    assert door.get("health/live") == 200
    assert door.triton.seen == []


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET /v2 HT", post_bytes(GENERATE, b"{ }")[:-2]],
    ids=["nothing", "half a head", "half a body"],
)
def test_half_a_request_is_closed(door: Door, sent: bytes) -> None:
    limit = max(HEADER_TIME, BODY_TIME)
    with door.connect(sent) as connection:
        begun = time.monotonic()
        answer = connection.recv(9999)
        while connection.recv(9999):
            pass
        assert 0.5 * limit < time.monotonic() - begun < WAIT
    assert answer == b"" if not sent.startswith(b"POST") else b" 408 " in answer


FLOOD = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
sys.path[:0] = sys.argv[1].split(":")
from live import gateway_over
from dflash_trt.serving.ports import Ports
with gateway_over(Ports(int(sys.argv[2]), 1, 1), int(sys.argv[3])):
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_half_open_connections_keep_nobody_out(tmp_path: Path) -> None:
    """300 of them at 256 descriptors; a request is answered while they are there."""
    with fake_triton() as triton, ExitStack() as stack:
        triton.go.set()
        port = free_ports().http
        tests = Path(__file__).parents[1]
        here = f"{tests / 'lib'}:{tests / 'fakes'}"
        process = subprocess.Popen(
            [sys.executable, "-c", FLOOD, here, str(triton.port), str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"TMPDIR": str(tmp_path)},
            text=True,
        )
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            for _ in range(300):
                connection = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                connection.sendall(b"POST /v2/models/dflash/generate HTTP/1.1\r\nContent-Le")
            answer = httpx.post(f"http://127.0.0.1:{port}/v2/{GENERATE}", json={}, timeout=10)
            assert answer.status_code == 200
            [log] = tmp_path.iterdir()
            deadline = time.monotonic() + WAIT
            while not log.read_text() and time.monotonic() < deadline:
                time.sleep(0.05)  # the line is written after the answer
            said = log.read_text().splitlines()  # not even once: too many descriptors
            assert [" dflash_trt.access: " in line for line in said] == [True]
        finally:
            process.communicate("", timeout=WAIT)
    assert process.returncode == 0


def test_many_at_once(door: Door) -> None:
    barrier = threading.Barrier(16)

    def ask(number: int) -> bool:
        barrier.wait(WAIT)
        return all(
            door.post(GENERATE, {"text_input": f"{number}"}).status_code == 200 for _ in range(10)
        )

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(ask, range(16)))
    assert len(door.triton.seen) == 160

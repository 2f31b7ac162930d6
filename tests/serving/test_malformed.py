"""What ends a Triton 2.51 that clients reach as it is, over HTTP and gRPC.

How many malformed requests, and of which seed: MALFORMED_COUNT and MALFORMED_SEED.
"""

import json
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from live import serve_ports, serving
from malformed_http import Outcome, fault, request, send

from dflash_trt.serving.client import stream
from dflash_trt.serving.ports import Ports, free_ports
from dflash_trt.serving.server.process import Server
from dflash_trt.serving.server.run import running_server

pytestmark = pytest.mark.models

COUNT = int(os.environ.get("MALFORMED_COUNT", "300"))
SEED = int(os.environ.get("MALFORMED_SEED", "0"))
WAIT = 60.0
LONGEST = 10.0  # seconds to the answer to a malformed request, and after a flood
INFER, GENERATE = "models/dflash_infer/infer", "models/dflash/generate"
A = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["a"]}
THREE = {"name": "max_tokens", "shape": [1], "datatype": "INT32", "data": [3]}
FP32 = {"name": "top_p", "shape": [1 << 40], "datatype": "FP32", "data": [1]}


@pytest.fixture(scope="module")
def server(built: Path) -> Iterator[Ports]:
    """Nobody restarts it."""
    with running_server(built) as ports:
        yield ports


def post(ports: Ports, path: str, content: bytes | Iterator[bytes]) -> int | None:
    """The status; None when the connection was closed while we were sending."""
    try:
        url = f"http://127.0.0.1:{ports.http}/v2/{path}"
        answer = httpx.post(url, content=content, timeout=WAIT)
        assert answer.text
        return answer.status_code
    except httpx.TransportError:
        return None


def infer(ports: Ports, *inputs: dict[str, Any]) -> int | None:
    return post(ports, INFER, json.dumps({"inputs": inputs or [A, THREE]}).encode())


def chunks() -> Iterator[bytes]:
    yield b'{"text_input": "'
    for _ in range(1_000_000):
        yield b"a"


@pytest.mark.parametrize("name", ["shape", "4 MB", "chunks", "deep", "deep data", "binary"])
def test_what_ended_triton(server: Ports, name: str) -> None:
    if name == "shape":
        assert infer(server, FP32) == 400
    elif name == "4 MB":
        assert infer(server, {**A, "data": ["a" * 4_000_000]}) in (413, None)
    elif name == "chunks":
        assert post(server, GENERATE, chunks()) in (400, 408, None)
    elif name == "deep":
        deep = b"[" * 500_000 + b"]" * 500_000
        assert post(server, GENERATE, b'{"text_input": "a", "x": ' + deep + b"}") == 400
    elif name == "deep data":
        text = json.dumps({"inputs": [{**A, "data": 5}]})
        text = text.replace("5", "[" * 500_000 + '"a"' + "]" * 500_000)
        assert post(server, INFER, text.encode()) == 400
    else:
        binary = {k: v for k, v in FP32.items() if k != "data"}
        assert infer(server, {**binary, "parameters": {"binary_data_size": 4}}) == 400
    assert infer(server) == 200


def test_a_wrong_type_is_the_clients_fault(server: Ports) -> None:
    for body, words in (
        ({"max_tokens": "x"}, "max_tokens is not an integer"),
        ({"max_tokens": 2**31}, "max_tokens is not an integer"),
        ({"max_tokens": True}, "max_tokens is not an integer"),
        ({"seed": -1}, "seed is not an integer"),
        ({"temperature": "hot"}, "temperature is not a number"),
        ({"stream": 1}, "stream is not true or false"),
        ({"stop_words": ["a", 5]}, "stop_words is not a string"),
        ({"messages": [{"role": "user"}]}, "messages is not a string"),
        ({"max_token": 5}, "'max_token' is no field of this request. Is it max_tokens?"),
        ({"stop": "a"}, "'stop' is no field of this request. Is it stop_words?"),
        ({"parameters": {"top_q": 1}}, "'top_q' is no field of this request. Is it top_p?"),
    ):
        for action in ("generate", "generate_stream"):
            url = f"http://127.0.0.1:{server.http}/v2/models/dflash/{action}"
            answer = httpx.post(url, json={"text_input": "a", **body}, timeout=60)
            assert words in answer.text
            assert answer.status_code == 400
    fields = {"max_tokens": 2, "temperature": 0, "stop_words": ["x"], "timeout": 60_000_000}
    nested = {"text_input": "a", "id": "1", "parameters": fields}
    assert post(server, GENERATE, json.dumps({"text_input": "a", **fields}).encode()) == 200
    assert post(server, GENERATE, json.dumps(nested).encode()) == 200
    ids = {"input_ids": [5, 6], "stop_token_ids": [0], "max_tokens": 2}
    assert post(server, GENERATE, json.dumps(ids).encode()) == 200
    assert infer(server, {**A, "data": [5]}) == 400


def test_tritons_own_port_wants_a_key_before_it_parses(built: Path) -> None:
    with Server(built, free_ports()) as server:
        server.wait_ready()
        for inputs in ([FP32], [A, THREE]):
            assert infer(server.ports, *inputs) == 403
        url = f"http://127.0.0.1:{server.ports.http}/v2/health/ready"
        assert httpx.get(url).status_code == 403
        assert server.health.probe(WAIT) == 200
        server.kill()  # faster than stopping it


def test_half_open_connections_stop_nothing(built: Path) -> None:
    """300 at each door with 256 descriptors: others are answered, and nothing is restarted."""
    ports = serve_ports()
    with ExitStack() as stack:
        process, _ = stack.enter_context(serving(built, ports, files=256))
        half = b"POST /v1/completions HTTP/1.1\r\nContent-Le"
        preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
        for door, sent in ((ports.http, half), (ports.grpc, b""), (ports.grpc, preface)):
            for _ in range(300):
                connection = stack.enter_context(socket.create_connection(("127.0.0.1", door)))
                with suppress(ConnectionError):  # the one that was silent for longest is closed
                    connection.sendall(sent)
        begun = time.monotonic()
        body = {"model": "pycode", "prompt": "a", "max_tokens": 3}
        url = f"http://127.0.0.1:{ports.http}/v1/completions"
        assert httpx.post(url, json=body, timeout=WAIT).status_code == 200
        assert infer(ports) == 200
        assert list(stream(f"127.0.0.1:{ports.grpc}", "a", max_tokens=3))
        assert time.monotonic() - begun < LONGEST
        process.send_signal(signal.SIGTERM)
        said, complained = process.communicate(timeout=WAIT)
        assert process.returncode == 0
        assert "restarting" not in said
        assert complained == ""


def test_malformed_requests(built: Path) -> None:
    ports = serve_ports()
    with serving(built, ports) as (process, _):

        def run(number: int) -> tuple[str, Outcome]:
            wrong = request(SEED, number)
            outcome = send(wrong, ports.http)
            found = fault(wrong, outcome, LONGEST)
            return (f"{number}: {found}: {outcome.answer[:300]!r}" if found else ""), outcome

        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(run, range(COUNT)))
        statuses = Counter(outcome.status for _, outcome in results)
        slowest = max(outcome.seconds for _, outcome in results)
        print(f"seed {SEED}: {dict(statuses)}, slowest {slowest:.1f} s")
        assert [problem for problem, _ in results if problem] == []
        assert statuses[400] > COUNT / 5
        assert statuses[200] > 0
        assert infer(ports) == 200
        process.send_signal(signal.SIGTERM)
        said, complained = process.communicate(timeout=WAIT)
        assert process.returncode == 0
        assert "restarting" not in said
        assert complained == ""

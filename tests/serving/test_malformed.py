"""What ends a Triton 2.51 that clients reach as it is, over HTTP and gRPC.

How many malformed requests, and of which seed: MALFORMED_COUNT and MALFORMED_SEED over HTTP,
HOSTILE_COUNT and HOSTILE_SEED over gRPC.
"""

import os
import signal
import socket
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from hypothesis import given, seed, settings
from tritonclient.grpc import service_pb2_grpc

from dflash_trt.builder.opened import OpenedBuild
from dflash_trt.serving.client import Client, stream
from dflash_trt.serving.ports import Ports, free_ports
from dflash_trt.serving.supervisor.process import Server
from tests.support import strategies
from tests.support.malformed_http import Outcome, fault, request, send
from tests.support.servers import serve_ports, serving

pytestmark = pytest.mark.models

COUNT = int(os.environ.get("MALFORMED_COUNT", "300"))
SEED = int(os.environ.get("MALFORMED_SEED", "0"))
HOSTILE_COUNT = int(os.environ.get("HOSTILE_COUNT", "150"))
HOSTILE_SEED = int(os.environ.get("HOSTILE_SEED", "0"))
INDISCREET = ("Traceback", "/site-packages/", ".py")
WAIT = 60.0
LONGEST = 10.0  # seconds to the answer to a malformed request, and after a flood
INFER, GENERATE = "models/dflash_infer/infer", "models/dflash/generate"
A = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["a"]}
THREE = {"name": "max_tokens", "shape": [1], "datatype": "INT32", "data": [3]}
FP32 = {"name": "top_p", "shape": [1 << 40], "datatype": "FP32", "data": [1]}


def post(ports: Ports, path: str, body: Any) -> int:
    url = f"http://127.0.0.1:{ports.http}/v2/{path}"
    return httpx.post(url, json=body, timeout=WAIT).status_code


def infer(ports: Ports, *inputs: dict[str, Any]) -> int:
    return post(ports, INFER, {"inputs": inputs or [A, THREE]})


def test_a_wrong_type_is_the_clients_fault(plain: Ports) -> None:
    for body, words in (
        ({"max_tokens": "x"}, "max_tokens is not an integer"),
        ({"max_tokens": 2**31}, "max_tokens is not an integer"),
        ({"max_tokens": True}, "max_tokens is not an integer"),
        ({"seed": -1}, "seed is not an integer"),
        ({"temperature": "hot"}, "temperature is not a number"),
        ({"stream": 1}, "stream is not true or false"),
        ({"stop_words": ["a", 5]}, "stop_words[1] is not a string"),
        ({"messages": [{"role": "user"}]}, "messages is not a string"),
        ({"max_token": 5}, "'max_token' is no field of this request. Leave it out"),
        ({"stop": "a"}, "'stop' is no field of this request. Leave it out"),
        ({"parameters": {"top_q": 1}}, "'top_q' is no field of this request. Leave it out"),
    ):
        for action in ("generate", "generate_stream"):
            url = f"http://127.0.0.1:{plain.http}/v2/models/dflash/{action}"
            answer = httpx.post(url, json={"text_input": "a", **body}, timeout=60)
            assert words in answer.text
            assert answer.status_code == 400
    fields = {"max_tokens": 2, "temperature": 0, "stop_words": ["x"], "timeout": 60_000_000}
    nested = {"text_input": "a", "id": "1", "parameters": fields}
    assert post(plain, GENERATE, {"text_input": "a", **fields}) == 200
    assert post(plain, GENERATE, nested) == 200
    ids = {"input_ids": [5, 6], "stop_token_ids": [0], "max_tokens": 2}
    assert post(plain, GENERATE, ids) == 200
    assert infer(plain, {**A, "data": [5]}) == 400


def test_tritons_own_port_wants_a_key_before_it_parses(built: Path) -> None:
    with Server(OpenedBuild(built, "none"), free_ports()) as server:
        server.wait_ready()
        for inputs in ([FP32], [A, THREE]):
            assert infer(server.ports, *inputs) == 403
        url = f"http://127.0.0.1:{server.ports.http}/v2/health/ready"
        assert httpx.get(url).status_code == 403
        assert server.triton.probe(WAIT) == 200
        server.kill()  # faster than stopping it


def test_half_open_connections_stop_nothing(built: Path) -> None:
    """There are 300 at each port with 256 descriptors; others are answered, nothing restarts."""
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


def test_hostile_requests(built: Path) -> None:
    codes: Counter[str] = Counter()
    slowest = 0.0
    with Server(OpenedBuild(built, "none"), free_ports()) as server:
        server.wait_ready()
        processes = server.stubs()
        url = f"127.0.0.1:{server.ports.grpc}"
        with grpc.insecure_channel(url) as channel, Client(url) as good:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            alone = good.generate("def main():", max_tokens=16).text

            @seed(HOSTILE_SEED)
            @settings(strategies.EACH_ONCE, max_examples=HOSTILE_COUNT)
            @given(strategies.hostile_over_grpc)
            def one(request: strategies.Request) -> None:
                nonlocal slowest
                start = time.monotonic()
                answer = strategies.send(request, stub)
                slowest = max(slowest, time.monotonic() - start)
                codes[answer.code] += 1
                assert not any(word in answer.message for word in INDISCREET), answer

            one()
            assert good.generate("def main():", max_tokens=16).text == alone
        assert server.stubs() == processes
        assert "Traceback" not in server.log.path.read_text(errors="replace")
    print(dict(codes), f"slowest {slowest:.2f} s")
    assert slowest < LONGEST
    assert sum(codes.values()) >= HOSTILE_COUNT

"""What the gateway adds to a plain infer over HTTP, and to streams over gRPC.

    python -m pytest tests/benchmarks/bench_gateway.py -o addopts= -s

The same requests to Triton's own port and through the gateway, in turns, over kept connections.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import demo_pair
import pytest

from dflash_trt.serving.client import Client
from dflash_trt.serving.ports import LOOPBACK, Ports, free_ports
from dflash_trt.serving.security import GATEWAY_KEY, Security
from dflash_trt.serving.server.run import prepare

WARM_UP, TURNS = 20, 200
STREAM_TURNS = 30
LONG: Any = {"max_tokens": 128, "ignore_eos": True}


@pytest.mark.parametrize("tokens", [1, 16, 128])
def test_infer(tokens: int, built: Path) -> None:
    inputs = [
        {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["def main():"]},
        {"name": "max_tokens", "shape": [1], "datatype": "INT32", "data": [tokens]},
        {"name": "ignore_eos", "shape": [1], "datatype": "BOOL", "data": [True]},
    ]
    body = json.dumps({"inputs": inputs})
    with both_roads(built) as (inside, ports, security):
        roads = {
            "Triton": http.client.HTTPConnection(LOOPBACK, inside.http),
            "gateway": http.client.HTTPConnection(LOOPBACK, ports.http),
        }
        seconds: dict[str, list[float]] = {name: [] for name in roads}
        for turn in range(WARM_UP + TURNS):
            for name, road in roads.items():
                begun = time.perf_counter()
                headers = {GATEWAY_KEY: security.own_key}
                road.request("POST", "/v2/models/dflash_infer/infer", body, headers)
                answer = road.getresponse()
                answer.read()
                assert answer.status == 200
                if turn >= WARM_UP:
                    seconds[name].append(time.perf_counter() - begun)
        for road in roads.values():
            road.close()
    show(f"infer, {tokens} tokens", seconds)


@pytest.mark.parametrize("streams", [1, 8])
def test_streams(streams: int, built: Path) -> None:
    with both_roads(built) as (inside, ports, _), ThreadPoolExecutor(streams) as pool:
        roads = {
            "Triton": Client(f"{LOOPBACK}:{inside.grpc}"),
            "gateway": Client(f"{LOOPBACK}:{ports.grpc}"),
        }
        seconds: dict[str, list[float]] = {name: [] for name in roads}
        for turn in range(STREAM_TURNS + 2):
            for name, client in roads.items():
                begun = time.perf_counter()
                answers = pool.map(
                    lambda _, c=client: len(list(c.stream("def main():", **LONG))), range(streams)
                )
                assert min(answers) > 1
                if turn >= 2:
                    seconds[name].append(time.perf_counter() - begun)
        for client in roads.values():
            client.close()
    show(f"{streams} streams, 128 tokens", seconds)


@contextmanager
def both_roads(built: Path) -> Iterator[tuple[Ports, Ports, Security]]:
    """Triton's own ports, and the gateway's."""
    security, ports = Security(), free_ports()
    with ExitStack() as stack:
        server, gateway = prepare(stack, built, ports, security)
        stack.enter_context(server)
        gateway.start(server.log)
        server.wait_ready()
        gateway.tell("ready")
        yield server.ports, ports, security


def show(what: str, seconds: dict[str, list[float]]) -> None:
    direct, through = (1e3 * median(each) for each in seconds.values())
    print(f"\n{demo_pair.machine()}")
    print(
        f"{what}: Triton {direct:.2f} ms, through the gateway {through:.2f} ms "
        f"(+{through - direct:.2f} ms, {through / direct:.3f}x), medians of "
        f"{len(seconds['Triton'])}"
    )
    added, bar = through - direct, max(3.0, 0.1 * direct)  # milliseconds
    demo_pair.hold(f"what the gateway adds to {what}, ms", [added], least=-bar, most=bar)

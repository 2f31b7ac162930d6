"""What the gateway adds to a plain infer over HTTP.

    python -m pytest tests/benchmarks/bench_gateway.py -o addopts= -s

The same requests to Triton's own port and through the gateway, in turns, over kept connections.
"""

from __future__ import annotations

import http.client
import json
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import demo_pair
import pytest

from dflash_trt.serving.launch import HOST
from dflash_trt.serving.security import GATEWAY_KEY, Security
from dflash_trt.serving.server import free_ports, prepare

WARM_UP, TURNS = 20, 200


@pytest.mark.parametrize("tokens", [1, 16, 128])
def test_infer(tokens: int, built: Path) -> None:
    security, ports = Security(), free_ports()
    inputs = [
        {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["def main():"]},
        {"name": "max_tokens", "shape": [1], "datatype": "INT32", "data": [tokens]},
        {"name": "ignore_eos", "shape": [1], "datatype": "BOOL", "data": [True]},
    ]
    body = json.dumps({"inputs": inputs})
    with ExitStack() as stack:
        server, gateway = prepare(stack, built, ports, security)
        stack.enter_context(server)
        gateway.start(server.log)
        server.wait_ready()
        gateway.tell("ready")
        roads = {
            "Triton": http.client.HTTPConnection(HOST, server.ports.http),
            "gateway": http.client.HTTPConnection(HOST, ports.http),
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
    direct, through = (1e3 * median(each) for each in seconds.values())
    print(f"\n{demo_pair.machine()}")
    print(
        f"{tokens} tokens: Triton {direct:.2f} ms, through the gateway {through:.2f} ms "
        f"(+{through - direct:.2f} ms, {through / direct:.3f}x), medians of {TURNS}"
    )

"""Malformed and hostile requests over gRPC: a sentence in time, and nobody dies of it."""

import os
import time
from collections import Counter
from pathlib import Path

import grpc
import pytest
import strategies
from hypothesis import given, seed, settings
from tritonclient.grpc import service_pb2_grpc

from dflash_trt.serving.client import Client
from dflash_trt.serving.ports import free_ports
from dflash_trt.serving.server.process import Server

COUNT = int(os.environ.get("HOSTILE_COUNT", "150"))
SEED = int(os.environ.get("HOSTILE_SEED", "0"))
MOST_SECONDS = 10.0  # of one answer
INDISCREET = ("Traceback", "/site-packages/", ".py")


@pytest.mark.models
def test_hostile_requests(built: Path) -> None:
    codes: Counter[str] = Counter()
    slowest = 0.0
    with Server(built, free_ports()) as server:
        server.wait_ready()
        processes = server.stubs()
        url = f"127.0.0.1:{server.ports.grpc}"
        with grpc.insecure_channel(url) as channel, Client(url) as good:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            alone = good.generate("def main():", max_tokens=16).text

            @seed(SEED)
            @settings(strategies.EACH_ONCE, max_examples=COUNT)
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
    assert slowest < MOST_SECONDS
    assert sum(codes.values()) >= COUNT

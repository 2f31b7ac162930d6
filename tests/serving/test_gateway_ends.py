"""The gateway's process: when it takes requests, how it ends, and how it is started again."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from dflash_trt.serving.server.gateway import Gateway
from gateway_door import GENERATE, INFER, OK, STREAM, WAIT, Door, start
from live import gateway_over

from dflash_trt.errors import ServerError
from dflash_trt.serving.log import Log, Said
from dflash_trt.serving.ports import Ports, free_ports
from dflash_trt.serving.security import Security


@pytest.fixture
def own() -> Iterator[Door]:
    with ExitStack() as stack:
        yield start(stack)


def test_until_it_is_ready_it_says_so_at_once(own: Door) -> None:
    own.gateway.tell("unready")
    own.triton.go.set()
    deadline = time.monotonic() + WAIT
    while own.get("health/ready") != 400:
        assert time.monotonic() < deadline
    assert own.get("models/dflash/ready") == 400
    assert own.get("health/live") == 200
    answer = own.post(GENERATE, {"text_input": "a"})
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
    assert "not ready" in answer.json()["error"]
    own.gateway.tell("ready")
    while own.get("health/ready") != 200:
        assert time.monotonic() < deadline
    assert own.post(GENERATE, {"text_input": "a"}).status_code == 200


def test_a_drain_lets_running_requests_end(own: Door) -> None:
    with ThreadPoolExecutor() as pool:
        running = pool.submit(own.post, INFER, {"inputs": [OK]})
        while not own.triton.seen:
            time.sleep(0.01)
        own.gateway.tell("drain 600")
        while own.get("health/ready") != 400:
            time.sleep(0.01)
        refused = own.post(INFER, {"inputs": [OK]})
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
        assert refused.headers["Connection"] == "close"
        assert own.gateway.poll() is None
        own.triton.go.set()
        assert running.result(WAIT).json() == {"done": True}
    assert own.gateway.wait(WAIT)
    assert own.gateway.poll() == 0


def test_a_drain_that_is_over_ends_streams_with_an_event(own: Door) -> None:
    with (
        ThreadPoolExecutor() as pool,
        httpx.stream("POST", f"{own.url}/{STREAM}", json={"text_input": "a"}) as answer,
    ):
        lines = answer.iter_lines()
        assert next(lines) == 'data: {"number": 0}'
        waiting = pool.submit(own.post, INFER, {"inputs": [OK]})
        while len(own.triton.seen) < 2:
            time.sleep(0.01)
        own.gateway.tell("drain 0.5")
        *_, last, _ = lines
        assert "stopping" in json.loads(last.removeprefix("data: "))["error"]
        refused = waiting.result(WAIT)
        assert (refused.status_code, "stopping" in refused.json()["error"]) == (503, True)
    assert own.triton.cancelled.wait(WAIT)
    assert own.gateway.wait(WAIT)
    assert own.gateway.poll() == 0


def test_without_triton_a_request_is_503() -> None:
    port = free_ports().http
    with gateway_over(Ports(free_ports().http, 1, 1), port):
        answer = httpx.post(f"http://127.0.0.1:{port}/v2/{GENERATE}", json={}, timeout=WAIT)
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")


def test_it_ends_with_its_parent_and_gives_the_port_back(own: Door) -> None:
    process = own.gateway._process
    assert process is not None
    assert process.stdin is not None
    process.stdin.close()  # as when `serve` was killed
    assert process.wait(WAIT) == 0
    own.gateway.stop()
    with socket.create_server(("127.0.0.1", own.port)):
        pass


def test_a_dead_one_is_started_again_on_the_same_port(own: Door, tmp_path: Path) -> None:
    assert own.gateway._process is not None
    own.gateway._process.kill()
    assert own.gateway.wait(WAIT)
    assert own.gateway.poll() == -signal.SIGKILL
    own.gateway.tell("ready")  # to nobody
    own.gateway.start(Log(tmp_path / "log"))
    own.gateway.tell("ready")
    own.triton.go.set()
    assert own.post(GENERATE, {"text_input": "a"}).status_code == 200


@pytest.mark.parametrize("kills", [1, 3])
def test_one_that_is_killed_while_it_starts_is_started_again(
    own: Door, tmp_path: Path, kills: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    own.gateway._process.kill()  # type: ignore[union-attr]
    left, launch = iter(range(kills)), Gateway._launch

    def launch_and_kill(gateway: Gateway, said: Said) -> subprocess.Popen[str]:
        process = launch(gateway, said)
        if next(left, None) is not None:
            process.kill()
        return process

    monkeypatch.setattr(Gateway, "_launch", launch_and_kill)
    with ExitStack() as stack:
        if kills == 3:  # it is no accident
            stack.enter_context(pytest.raises(ServerError, match="the gateway did not start"))
        own.gateway.start(Log(tmp_path / "log"))
    assert (own.gateway.poll() is None) == (kills == 1)


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServerError, match=rf"port {port} \(http\) .*--http-port"):
            Gateway(Path(), replace(free_ports(), http=port), free_ports(), Security())

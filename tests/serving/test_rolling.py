"""Servers that are replaced one after the other: no request is lost, though nobody repeats one."""

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import grpc
import httpx
import pytest
import tritonclient.grpc

from tests.support.proxy import proxy
from tests.support.request_tools import wait_until
from tests.support.servers import serve_ports, serving

WAIT = 60.0
REQUESTS, CLIENTS, PAUSE = 2000, 4, 0.02  # seconds between two of a client
DELAY = "--drain-delay=2"
BODY = {"model": "dflash", "prompt": "def f(", "max_tokens": 4, "temperature": 0}


@pytest.mark.soak
def test_a_rolling_restart_loses_nothing(built: Path) -> None:
    ports = [serve_ports(), serve_ports()]
    rolled = threading.Event()
    with ExitStack() as stack:
        servers = [stack.enter_context(serving(built, each, DELAY))[0] for each in ports]
        url = stack.enter_context(proxy([each.http for each in ports]))

        def ask_until_rolled() -> list[httpx.Response]:
            answers = []
            with httpx.Client(timeout=WAIT) as client:
                while not rolled.is_set() or len(answers) < REQUESTS // CLIENTS:
                    answers.append(client.post(f"{url}/v1/completions", json=BODY))
                    time.sleep(PAUSE)
            return answers

        with ThreadPoolExecutor(CLIENTS) as pool:
            asking = [pool.submit(ask_until_rolled) for _ in range(CLIENTS)]
            for server, each in zip(servers, ports, strict=True):
                server.send_signal(signal.SIGTERM)
                assert server.wait(WAIT) == 0
                stack.enter_context(serving(built, each, DELAY))
                time.sleep(1)  # until the proxy has seen it
            rolled.set()
        answers = [answer for each in asking for answer in each.result()]
    assert len(answers) >= REQUESTS
    failed = [(answer.status_code, answer.text) for answer in answers if answer.status_code != 200]
    assert failed == []


def test_a_server_that_leaves_says_so_and_answers(built: Path) -> None:
    ports = serve_ports()
    url, triton = f"http://127.0.0.1:{ports.http}", f"127.0.0.1:{ports.grpc}"
    ready = ("/health", "/v2/health/ready", "/v2/models/dflash/ready")
    with (
        serving(built, ports, "--drain-delay=6") as (process, _),
        tritonclient.grpc.InferenceServerClient(triton) as client,
        httpx.Client(base_url=url, timeout=WAIT) as http,
    ):
        assert [http.get(path).status_code for path in ready] == [200] * 3
        assert client.is_server_ready()
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: http.get("/health").status_code == 503)
        assert [http.get(path).status_code for path in ready] == [503, 400, 400]
        wait_until(lambda: not client.is_server_ready())
        assert client.is_server_live()
        answer = http.post("/v1/completions", json=BODY)
        assert (answer.status_code, answer.headers["connection"]) == (200, "close")
        assert "dflash_ready 0\n" in http.get("/metrics").text
        assert process.poll() is None
        assert process.wait(WAIT) == 0
        with pytest.raises((httpx.HTTPError, grpc.RpcError)):
            http.get("/health")

"""Connections of the application's process: silent, slow, endless and too many; no Triton."""

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from dflash_trt.serving.http.connections import (
    HEADER_LIMIT,
    HEADER_TIME,
    REST_LIMIT,
    REST_TIME,
    SPARE,
    Connections,
)
from dflash_trt.serving.ports import Ports
from dflash_trt.serving.security import OWN_KEY_HEADER, Security
from tests.standins.triton_http import fake_triton
from tests.support.servers import openai_front

WAIT = 60.0
MARGIN = 5.0  # seconds that a busy machine may add
HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
INFER = "/v2/models/dflash_infer/infer"


@pytest.fixture(scope="module")
def served(built: Path) -> Iterator[str]:
    """Run an application whose Triton is ready, and whose answers to `infer` wait."""
    with ExitStack() as stack:
        triton = stack.enter_context(fake_triton())
        yield stack.enter_context(openai_front(built, Ports(triton.port, 1, 1)))


def connect(url: str, sent: bytes = b"") -> socket.socket:
    address = httpx.URL(url)
    connection = socket.create_connection((address.host, address.port), timeout=WAIT)
    connection.sendall(sent)
    return connection


def seconds_until_closed(connection: socket.socket) -> float:
    """Return how long the other end keeps a connection on which nothing more is sent."""
    begun = time.monotonic()
    try:
        while connection.recv(9999):
            pass
    except ConnectionResetError:
        pass
    return time.monotonic() - begun


SILENT = {
    "nothing": b"",
    "a line's end": b"\r\n",
    "a method": b"GET",
    "half headers": HEAD,
    "half a header": HEAD + b"X: a",
    "half a second request": HEAD + b"\r\n" + b"GET /",
}


def test_who_sends_no_request_is_closed(served: str) -> None:
    with ExitStack() as stack, ThreadPoolExecutor(len(SILENT) + 1) as pool:
        opened = [stack.enter_context(connect(served, sent)) for sent in SILENT.values()]
        slow = pool.submit(seconds_of_bytes, stack.enter_context(connect(served, HEAD)))
        for seconds in pool.map(seconds_until_closed, opened):
            assert seconds < HEADER_TIME + MARGIN
        assert slow.result() < HEADER_TIME + MARGIN
    assert httpx.get(f"{served}/health").status_code == 200


def seconds_of_bytes(connection: socket.socket) -> float:
    """Return how long the other end takes a header byte by byte."""
    begun = time.monotonic()
    try:
        while time.monotonic() - begun < 2 * HEADER_TIME:
            connection.sendall(b"X")
            time.sleep(0.2)
    except OSError:
        pass
    return time.monotonic() - begun


def sent_until_closed(connection: socket.socket, limit: int) -> int:
    """Return how many bytes were taken before the other end closed, at most about `limit`."""
    sent = 0
    piece = b"a" * 65_536
    try:
        while sent < limit:
            sent += connection.send(piece)
    except OSError:
        pass
    return sent


@pytest.mark.parametrize(
    "begin",
    [b"GET /", HEAD + b"X: ", HEAD],
    ids=["an endless path", "an endless header", "an endless name"],
)
def test_headers_without_an_end(served: str, begin: bytes) -> None:
    with connect(served, begin) as connection:
        assert sent_until_closed(connection, 100_000_000) < 20_000_000
    answer = httpx.get(f"{served}/health", headers={"x": "a" * (HEADER_LIMIT // 2)})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "headers",
    [{"x": "a" * HEADER_LIMIT}, {f"x-{n}": "a" * 1000 for n in range(70)}],
    ids=["a large one", "many"],
)
def test_large_headers_are_refused(served: str, headers: dict[str, str]) -> None:
    assert httpx.get(f"{served}/health", headers=headers).status_code == 431


def test_trailers_count_as_headers(served: str) -> None:
    chunked = f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
    with connect(served, chunked.encode()) as connection:
        connection.sendall(b"".join(b"x-%d: %s\r\n" % (n, b"a" * 1000) for n in range(70)))
        assert b" 431 " in connection.recv(9999)
        assert seconds_until_closed(connection) < MARGIN


REFUSED = {
    "no route": "POST /nothing HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\n",
    "an open path": "POST /metrics HTTP/1.1\r\nHost: localhost\r\n",
    "compressed": f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nContent-Encoding: gzip\r\n",
}


def test_the_rest_of_a_refused_body_is_not_read_for_ever(served: str) -> None:
    with ExitStack() as stack, ThreadPoolExecutor(len(REFUSED)) as pool:
        stopped = []
        for head in REFUSED.values():
            endless = f"{head}Content-Length: 100000000000\r\n\r\n".encode()
            with connect(served, endless) as connection:
                assert sent_until_closed(connection, 200_000_000) < REST_LIMIT + 20_000_000
            connection = stack.enter_context(connect(served, endless + b"a" * 3000))
            assert connection.recv(12).startswith(b"HTTP/1.1 4")
            stopped.append(connection)
        for seconds in pool.map(seconds_until_closed, stopped):
            assert seconds < REST_TIME + MARGIN


def test_a_body_that_was_refused_leaves_its_connection_open(served: str) -> None:
    body = b"a" * 5000
    head = f"POST /metrics HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    with connect(served, head.encode() + body) as connection:
        assert connection.recv(12) == b"HTTP/1.1 413"
        time.sleep(0.2)
        connection.recv(9999)
        connection.sendall(HEAD + b"\r\n")
        assert connection.recv(12) == b"HTTP/1.1 200"


def test_large_bodies_are_for_who_may_ask(built: Path) -> None:
    """Otherwise 129 clients without the key fill the memory of all bodies."""
    security = Security(keys=("inference-0123456789",))
    with ExitStack() as stack:
        triton = stack.enter_context(fake_triton())
        url = stack.enter_context(openai_front(built, Ports(triton.port, 1, 1), security))
        for method, path in (("POST", "/metrics"), ("POST", "/"), ("GET", "/v2/models/dflash")):
            answer = httpx.request(method, url + path, content=b"a" * 2000)
            assert answer.status_code == 413, path


def few_connections(built: Path, stack: ExitStack, files: int, security: Security) -> str:
    """Start an application with few file descriptors; return its address."""
    triton = stack.enter_context(fake_triton())
    return stack.enter_context(openai_front(built, Ports(triton.port, 1, 1), security, files=files))


def test_silent_connections_keep_nobody_out(built: Path) -> None:
    with ExitStack() as stack:
        url = few_connections(built, stack, 400, Security())
        silent = [stack.enter_context(connect(url)) for _ in range(600)]
        for _ in range(3):
            assert httpx.get(f"{url}/health", timeout=MARGIN).status_code == 200
            assert httpx.get(f"{url}/v1/models", timeout=MARGIN).status_code == 200
        first, last = silent[0], silent[-1]
        assert seconds_until_closed(first) < 1.0  # the oldest made room
        last.sendall(HEAD + b"\r\n")
        assert last.recv(12) == b"HTTP/1.1 200"


def test_health_is_answered_beside_as_many_requests_as_there_may_be(built: Path) -> None:
    security = Security()
    with ExitStack() as stack:
        url = few_connections(built, stack, 160, security)  # 16 connections
        head = f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"
        for _ in range(16):
            stack.enter_context(connect(url, head.encode()))  # with a body to come
        time.sleep(0.5)
        with httpx.Client(base_url=url, timeout=MARGIN) as client:
            assert client.get("/health").status_code == 200
            assert client.get("/v1/models").status_code == 503
            own = {OWN_KEY_HEADER: security.own_key}
            assert client.get("/v1/models", headers=own).status_code == 200


def test_no_log_grows_with_connections(built: Path, tmp_path: Path) -> None:
    with ExitStack() as stack:
        triton = stack.enter_context(fake_triton())
        log = tmp_path / "log"
        nothing_left = 64  # fewer than are reserved
        url = stack.enter_context(
            openai_front(built, Ports(triton.port, 1, 1), log=log, files=nothing_left)
        )
        with ThreadPoolExecutor(8) as pool:
            opened = [*pool.map(lambda _: connect(url), range(300))]
        time.sleep(2)
        for connection in opened:
            connection.close()
        assert httpx.get(f"{url}/health", timeout=WAIT).status_code == 200
        assert log.stat().st_size < 20_000
        assert "Traceback" not in log.read_text()


class FakeConnection:
    """A connection as `Connections` sees it: hashable, with a transport to abort."""

    def __init__(self) -> None:
        self.transport = self
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True


def test_who_waited_longest_makes_room() -> None:
    connections = Connections(3)
    first, second, third, fourth = (FakeConnection() for _ in range(4))
    for each in (first, second, third):
        connections.add(each)  # type: ignore[arg-type]
    connections.begin_request(first)  # type: ignore[arg-type]
    connections.add(fourth)  # type: ignore[arg-type]
    assert [each.aborted for each in (first, second, third, fourth)] == [False, True, False, False]
    connections.begin_request(third)  # type: ignore[arg-type]
    connections.end_request(third)  # type: ignore[arg-type]
    connections.add(FakeConnection())  # type: ignore[arg-type]
    assert fourth.aborted
    assert not third.aborted
    assert not connections.full


def test_connections_above_the_limit_are_few() -> None:
    connections = Connections(2)
    busy = [FakeConnection() for _ in range(2 + SPARE)]
    for each in busy:
        connections.add(each)  # type: ignore[arg-type]
        connections.begin_request(each)  # type: ignore[arg-type]
    assert connections.full
    assert not any(each.aborted for each in busy)
    last = FakeConnection()
    connections.add(last)  # type: ignore[arg-type]
    assert last.aborted
    connections.remove(busy[0])  # type: ignore[arg-type]
    assert connections.full

"""A reverse proxy that sends each request once, to a server that says it is ready.

It keeps connections to servers open, asks `/health` as load balancers do, and never repeats a
request: what a server does not answer is a 502.
"""

import http.client
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HEALTH_INTERVAL = 0.1  # seconds
TIMEOUT = 60.0  # seconds
FAILURES = (OSError, http.client.HTTPException)


class _Server:
    """A server behind the proxy."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.ready = False
        self.idle: list[http.client.HTTPConnection] = []

    def look(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            self.ready = connection.getresponse().status == 200
        except FAILURES:
            self.ready = False
        finally:
            connection.close()
        if not self.ready:
            while self.idle:
                self.idle.pop().close()

    def ask(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        try:
            connection = self.idle.pop()
        except IndexError:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            content = answer.read()
        except FAILURES as error:
            connection.close()
            return 502, repr(error).encode()
        if answer.will_close:
            connection.close()
        else:
            self.idle.append(connection)
        return answer.status, content


@contextmanager
def proxy(ports: Sequence[int]) -> Iterator[str]:
    """Yield the address of a proxy before the servers at these ports of 127.0.0.1."""
    servers = [_Server(port) for port in ports]
    turn = itertools.count()
    over = threading.Event()

    def watch(server: _Server) -> None:
        while not over.wait(HEALTH_INTERVAL):
            server.look()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            ready = [server for server in servers if server.ready]
            status, content = 502, b"no server is ready"
            if ready:
                status, content = ready[next(turn) % len(ready)].ask("POST", self.path, body)
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None: ...

    http_server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http_server.daemon_threads = True
    jobs = [threading.Thread(target=http_server.serve_forever, daemon=True)]
    jobs += [threading.Thread(target=watch, args=(server,), daemon=True) for server in servers]
    for job in jobs:
        job.start()
    try:
        deadline = time.monotonic() + TIMEOUT
        while not all(server.ready for server in servers) and time.monotonic() < deadline:
            time.sleep(HEALTH_INTERVAL)
        yield f"http://127.0.0.1:{http_server.server_port}"
    finally:
        over.set()
        http_server.shutdown()
        http_server.server_close()

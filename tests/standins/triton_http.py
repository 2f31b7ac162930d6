"""Triton's HTTP as far as the gateway sees it: keeps what came, and answers by the path."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class FakeTriton:
    """A Triton whose streams last as long as their client; `go` lets `dflash_infer` answer."""

    port: int = 0
    seen: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    go: threading.Event = field(default_factory=threading.Event)
    cancelled: threading.Event = field(default_factory=threading.Event)  # a stream's client is gone


@contextmanager
def fake_triton() -> Iterator[FakeTriton]:
    fake = FakeTriton()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._whole({"path": self.path})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            headers = {name.lower(): value for name, value in self.headers.items()}
            fake.seen.append((self.path, headers, body))
            if self.path.endswith("generate_stream"):
                self._stream()
            else:
                fake.go.wait(30)
                self._whole({"done": True})

        def _whole(self, value: Any) -> None:
            content = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def _stream(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream; charset=utf-8")
            self.send_header("Connection", "close")
            self.end_headers()
            try:
                for number in range(600):
                    self.wfile.write(f'data: {{"number": {number}}}\n\n'.encode())
                    time.sleep(0.05)
            except OSError:
                fake.cancelled.set()

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    fake.port = server.server_port
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield fake
    finally:
        fake.go.set()
        server.shutdown()
        server.server_close()

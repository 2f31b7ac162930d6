"""A gateway over a fake Triton, and how the tests ask it."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import httpx
from dflash_trt.serving.server.gateway import Gateway
from fake_triton import FakeTriton, fake_triton
from live import gateway_over

from dflash_trt.serving.ports import Ports, free_ports
from dflash_trt.serving.security import Security

WAIT = 60.0
INFER, STREAM = "models/dflash_infer/infer", "models/dflash/generate_stream"
GENERATE = "models/dflash/generate"
OK = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["a"]}


@dataclass
class Door:
    triton: FakeTriton
    gateway: Gateway
    security: Security
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v2"

    def post(self, path: str, body: Any = None, **headers: str) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        return httpx.post(f"{self.url}/{path}", content=content, headers=names, timeout=WAIT)

    def get(self, path: str, **headers: str) -> int:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        return httpx.get(f"{self.url}/{path}", headers=names, timeout=WAIT).status_code

    def connect(self, sent: bytes = b"") -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=WAIT)
        connection.sendall(sent)
        return connection


def start(stack: ExitStack, security: Security | None = None) -> Door:
    triton, port = stack.enter_context(fake_triton()), free_ports().http
    security = security or Security()
    ports = Ports(triton.port, 1, 1)
    return Door(triton, stack.enter_context(gateway_over(ports, port, security)), security, port)

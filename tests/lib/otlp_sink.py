"""A loopback OTLP sink: what a server sends by HTTP, kept span by span.

The SDK sends protobuf, Triton JSON: that has its ids as hex, which reads as base64 there.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

WAIT = 20.0


class Span(NamedTuple):
    """times in seconds; events: name and attributes of each."""

    name: str
    trace: str
    id: str
    parent: str
    kind: int
    start: float
    end: float
    about: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]
    failed: bool
    service: str


class Sink:
    def __init__(self, url: str) -> None:
        self.url = url
        self._spans: list[Span] = []
        self._came = threading.Condition()

    def take(self, body: bytes, json: bool) -> None:
        request = ExportTraceServiceRequest()
        if json:
            json_format.Parse(body, request)
        else:
            request.ParseFromString(body)
        with self._came:
            for resource in request.resource_spans:
                service = _read(resource.resource.attributes)["service.name"]
                for scope in resource.scope_spans:
                    self._spans += [_span(each, service, json) for each in scope.spans]
            self._came.notify_all()

    def trace(self, trace: str, count: int) -> dict[str, Span]:
        """The spans of a trace by name, when there are `count` of them."""
        with self._came:
            self._came.wait_for(lambda: len(self._of(trace)) >= count, WAIT)
            found = self._of(trace)
        assert len(found) == count, [each.name for each in found]
        return {each.name: each for each in found}

    def count(self, trace: str) -> int:
        with self._came:
            return len(self._of(trace))

    def _of(self, trace: str) -> list[Span]:
        return [each for each in self._spans if each.trace == trace]


def _span(span: Any, service: str, json: bool) -> Span:
    ids = (span.trace_id, span.span_id, span.parent_span_id)
    return Span(
        span.name,
        *(base64.b64encode(each).decode() if json else each.hex() for each in ids),
        span.kind,
        span.start_time_unix_nano / 1e9,
        span.end_time_unix_nano / 1e9,
        _read(span.attributes),
        [(event.name, _read(event.attributes)) for event in span.events],
        span.status.code == span.status.STATUS_CODE_ERROR,
        service,
    )


def _read(attributes: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    found = getattr(value, kind)
    return [_value(each) for each in found.values] if kind == "array_value" else found


@contextmanager
def open_sink(hold: threading.Event | None = None) -> Iterator[Sink]:
    """hold: it answers nobody until that is set."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if hold is not None:
                hold.wait(WAIT)
            assert self.path == "/v1/traces"
            sink.take(body, "json" in self.headers["Content-Type"])
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        sink = Sink(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield sink
        server.shutdown()

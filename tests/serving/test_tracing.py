"""Trace context: passed on to Triton, and a span for each HTTP request where a sink is named."""

import asyncio
import secrets
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from dflash_trt.serving import tracing
from tests.standins import triton_grpc as stand_in
from tests.standins.triton_grpc import part, parts
from tests.support.servers import openai_front

WAIT = 30.0
BODY = {"model": "pycode", "prompt": "a"}


@contextmanager
def sink() -> Iterator[tuple[str, Queue[Any]]]:
    """Serve an OTLP collector's HTTP endpoint; return the spans that it got."""
    spans = Queue[Any]()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        spans.put(span)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", spans
    finally:
        server.shutdown()
        server.server_close()


def test_a_request_has_a_span_in_the_clients_trace(
    chat_built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, client = secrets.token_hex(16), secrets.token_hex(8)
    counts = {"prompt_tokens": [5], "completion_tokens": [4], "rounds": [2], "accepted": [1]}
    answered = parts(part(text_output=["ok"], **counts))
    with sink() as (url, spans), stand_in.stand_in(answered) as server:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        with openai_front(chat_built, server.ports) as own:
            answer = httpx.post(
                f"{own}/v1/completions",
                json=BODY,
                headers={"traceparent": f"00-{trace}-{client}-01"},
                timeout=WAIT,
            )
            assert answer.status_code == 200
            for probe in ("health", "metrics", "v2/health/ready", "v2/models/dflash/ready"):
                httpx.get(f"{own}/{probe}", timeout=WAIT)
            span = spans.get(timeout=WAIT)
            models = httpx.get(f"{own}/v1/models", timeout=WAIT)
            assert (models.status_code, spans.get(timeout=WAIT).name) == (200, "GET /v1/models")
            assert spans.empty()
        said = {each.key: each.value for each in span.attributes}
        assert said["gen_ai.operation.name"].string_value == "text_completion"
        assert said["gen_ai.request.model"].string_value == "pycode"
        assert said["gen_ai.usage.input_tokens"].int_value == 5
        assert said["gen_ai.usage.output_tokens"].int_value == 4
        assert said["dflash.acceptance_length"].double_value == 1.5
        assert said["dflash.request_id"].string_value == answer.headers["x-request-id"]
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (trace, client)
        assert server.said[0]["traceparent"] == f"00-{trace}-{span.span_id.hex()}-01"


def test_without_a_sink_the_clients_context_goes_on(chat_built: Path) -> None:
    header = f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"
    with stand_in.stand_in(parts(part(text_output=["ok"]))) as server:
        with openai_front(chat_built, server.ports) as own:
            url = f"{own}/v1/completions"
            assert httpx.post(url, json=BODY, headers={"traceparent": header}).status_code == 200
        assert server.said[0]["traceparent"] == header


@pytest.mark.parametrize(
    "missing", ["opentelemetry.propagate", "opentelemetry.instrumentation.asgi"]
)
def test_without_the_extra_the_clients_context_goes_on(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setitem(sys.modules, missing, None)
    found = []

    async def app(*_: object) -> None:
        found.append(tracing.trace_headers())

    scope = {"headers": [(b"traceparent", b"00-1-2-01"), (b"accept", b"*/*")]}
    call: Any = tracing.instrument(app)
    asyncio.run(call(scope, None, None))
    assert found == [{"traceparent": "00-1-2-01"}]

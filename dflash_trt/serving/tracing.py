"""Request ids and W3C trace context through all processes, and a span per HTTP request.

Spans are of OpenTelemetry's ASGI middleware, configured by its variables (docs/serving.md). Without
an endpoint or the extra `otel`, OpenTelemetry is not imported.
"""

import logging
import os
import re
import uuid
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.trace import Span
    from starlette.types import ASGIApp, Receive, Scope, Send

log = logging.getLogger(__name__)

CONTEXT = ("traceparent", "tracestate")  # headers of W3C Trace Context
HEADER = "x-request-id"  # over HTTP and gRPC; Triton makes it a request parameter
_FORM = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)  # safe in a header and a log
current: ContextVar[str] = ContextVar("request_id", default="")
SERVICE = "dflash-trt"  # default of OTEL_SERVICE_NAME
_context: ContextVar[dict[str, str]] = ContextVar("trace_context")
_span: ContextVar["Span | None"] = ContextVar("span", default=None)
PROBES = "/health$,/metrics$,/v2/health/,/ready$"  # patterns of requests without a span


def traces_url() -> str | None:
    base = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    url = f"{base.rstrip('/')}/v1/traces" if base else None
    return os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or url


def trace_headers() -> dict[str, str]:
    return _context.get({})


def describe(**attributes: str | int | float | Sequence[str]) -> None:
    """Add attributes to the span of the running request; `__` in a name stands for a dot."""
    span = _span.get()
    if span is not None:
        span.set_attributes({name.replace("__", "."): v for name, v in attributes.items()})


def instrument(app: "ASGIApp") -> "ASGIApp":
    """Return the application with a span per request, and with `trace_headers` set."""
    if traces_url() is None:
        return _with_context(app)
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
            OTLPSpanExporter,
        )
        from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware  # noqa: PLC0415
        from opentelemetry.propagate import inject  # noqa: PLC0415
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
        from opentelemetry.trace import get_current_span  # noqa: PLC0415
    except ImportError as error:
        log.warning("no traces: %s. Run: pip install 'dflash-trt[otel]'", error)
        return _with_context(app)
    name = os.environ.get("OTEL_SERVICE_NAME") or SERVICE
    provider = TracerProvider(resource=Resource.create({"service.name": name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    instrumented: ASGIApp = OpenTelemetryMiddleware(
        _with_context(_with_span(app, get_current_span), inject),
        excluded_urls=PROBES,
        tracer_provider=provider,  # not global: libraries would add spans of their own
        exclude_spans=["send", "receive"],
    )
    return instrumented


def _with_span(app: "ASGIApp", get_span: "Callable[[], Span]") -> "ASGIApp":
    async def with_span(scope: "Scope", receive: "Receive", send: "Send") -> None:
        _span.set(get_span())
        await app(scope, receive, send)

    return with_span


def _with_context(
    app: "ASGIApp", inject: Callable[[dict[str, str]], None] | None = None
) -> "ASGIApp":
    """Set `trace_headers` for each request; inject: replaces the client's span by ours."""

    async def with_context(scope: "Scope", receive: "Receive", send: "Send") -> None:
        headers = {name.decode("latin-1"): value for name, value in scope["headers"]}
        carrier = {name: headers[name].decode("latin-1") for name in CONTEXT if name in headers}
        if inject is not None:
            inject(carrier)
        _context.set(carrier)
        await app(scope, receive, send)

    return with_context


def valid_or_new_id(*given: object) -> str:
    fitting = (header for header in given if isinstance(header, str) and _FORM.fullmatch(header))
    return next(fitting, None) or uuid.uuid4().hex

"""OpenTelemetry in a process of the server, set up by its own variables: docs/operations.md.

Where they name no endpoint, or its SDK is not installed, nothing of it is imported.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Tracer

log = logging.getLogger(__name__)

CONTEXT = ("traceparent", "tracestate")  # headers of W3C Trace Context, parameters within Triton
SERVICE = "dflash-trt"  # the service's name where OTEL_SERVICE_NAME gives none
HTTP = "http/protobuf"
CLOSE_TIMEOUT = 2.0  # seconds
SAMPLED = tuple("13579bdf")  # what the traceparent of a trace that is recorded ends with


def endpoint() -> str | None:
    """The URL that spans go to; None: tracing is off."""
    exporter, base = _said("TRACES_EXPORTER"), _said("EXPORTER_OTLP_ENDPOINT")
    if _said("SDK_DISABLED").lower() == "true" or exporter not in ("", "otlp"):
        return None
    url = base and f"{base.rstrip('/')}/v1/traces"
    return _said("EXPORTER_OTLP_TRACES_ENDPOINT") or url or None


def _said(name: str) -> str:
    return os.environ.get(f"OTEL_{name}", "")


@cache
def _provider() -> "TracerProvider | None":
    if endpoint() is None:
        return None
    protocol = _said("EXPORTER_OTLP_TRACES_PROTOCOL") or _said("EXPORTER_OTLP_PROTOCOL") or HTTP
    if protocol != HTTP:
        log.warning("no traces: OTEL_EXPORTER_OTLP_PROTOCOL is %s. Make it %s.", protocol, HTTP)
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
            OTLPSpanExporter,
        )
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

        resource = Resource.create({"service.name": SERVICE}).merge(OTELResourceDetector().detect())
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    except ImportError as error:
        log.warning("no traces: %s. Run: pip install 'dflash-trt[otel]'", error)
        return None
    except ValueError as error:  # of another variable
        log.warning("no traces: %s", error)
        return None
    return provider


@cache
def tracer() -> "Tracer | None":
    """This process's; None where tracing is off."""
    provider = _provider()
    found: Tracer | None = provider.get_tracer("dflash_trt") if provider else None
    return found


def close() -> None:
    """Sends what is left, in 2 s at most."""
    if (provider := _provider()) is not None:
        ending = threading.Thread(target=provider.shutdown, name="last spans", daemon=True)
        ending.start()
        ending.join(CLOSE_TIMEOUT)


def parent(headers: Mapping[str, Any]) -> "Context":
    """That of a request by its headers or parameters; to be called where tracing is on."""
    from opentelemetry.trace.propagation import tracecontext  # noqa: PLC0415

    said = {name: str(headers[name]) for name in CONTEXT if name in headers}
    found: Context = tracecontext.TraceContextTextMapPropagator().extract(said)
    return found


def sampled(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers of a trace that is recorded, for Triton, which looks at no flag; else {}."""
    found = {name: headers[name] for name in CONTEXT if name in headers}
    return found if found.get("traceparent", "").endswith(SAMPLED) else {}


def current() -> dict[str, str]:
    """The headers that tell the next process of the current span; {} where tracing is off."""
    carrier: dict[str, str] = {}
    if tracer() is not None:
        from opentelemetry.trace.propagation import tracecontext  # noqa: PLC0415

        tracecontext.TraceContextTextMapPropagator().inject(carrier)
    return carrier


@contextmanager
def http_span(
    method: str, path: str, headers: Mapping[str, str], status: Callable[[], int]
) -> Iterator[None]:
    """A span of a client's request; status: the answer's, asked for at its end.

    Of a POST, which asks for a text; others ask how the server is.
    """
    if method != "POST" or (own := tracer()) is None:
        yield
        return
    from opentelemetry.trace import SpanKind, StatusCode  # noqa: PLC0415

    about = {"http.request.method": method, "url.path": path, "url.scheme": "http"}
    with own.start_as_current_span(method, parent(headers), SpanKind.SERVER, about) as span:
        try:
            yield
        finally:
            code = status()
            span.set_attribute("http.response.status_code", code)
            if code != 404:  # else anybody could make names
                span.update_name(f"{method} {path}")
                span.set_attribute("http.route", path)
            if code >= 500:
                span.set_attribute("error.type", str(code))
                span.set_status(StatusCode.ERROR)

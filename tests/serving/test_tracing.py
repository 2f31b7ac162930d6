"""Traces: one of a request through all processes, none where they are off, harm from no sink."""

from __future__ import annotations

import json
import secrets
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
from chat_pair import build_chat_pair
from fronts import CountingModel, ask, open_front, wait_until
from live import serving

from dflash_trt.serving import tracing
from dflash_trt.serving.client import Client
from dflash_trt.serving.front import request_trace
from dflash_trt.serving.ports import Ports, free_ports
from dflash_trt.serving.security import Security
from dflash_trt.serving.server import launch
from dflash_trt.serving.server.run import prepare

pytest.importorskip("opentelemetry.sdk.trace")
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from otlp_sink import Sink, Span, open_sink

WAIT = 30.0
SERVER, INTERNAL = 2, 1  # kinds of span
OWN = ("queue", "prefill", "rounds", "send")  # within a request
PARTS = (*OWN, "verify", "draft")


class Traced(NamedTuple):
    ports: Ports
    openai: int
    sink: Sink


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo pair with a chat template."""
    return build_chat_pair(tmp_path_factory.mktemp("traced"))


@pytest.fixture(scope="module")
def server(built: Path) -> Iterator[Traced]:
    ports, port = free_ports(), free_ports().http
    with ExitStack() as stack:
        sink = stack.enter_context(open_sink())
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", sink.url)
            patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
            stack.enter_context(serving(built, ports, f"--openai-port={port}"))
        yield Traced(ports, port, sink)


def new_trace(sampled: bool = True) -> tuple[str, str, str]:
    """A client's trace, its span, and the header that says so."""
    trace, span = secrets.token_hex(16), secrets.token_hex(8)
    return trace, span, f"00-{trace}-{span}-{'01' if sampled else '00'}"


def check_tree(spans: dict[str, Span], top: str, request: str, client: str) -> None:
    """The client's span, the gateway's, the request's, its parts; the rounds have the engines'."""
    assert spans[top].parent == client
    if request != top:
        assert spans[request].parent == spans[top].id
    assert {spans[name].parent for name in OWN} == {spans[request].id}
    assert {spans[name].parent for name in ("verify", "draft")} == {spans["rounds"].id}
    assert {each.service for each in spans.values()} == {"dflash-trt"}
    whole = spans[request]
    edges = [whole.start, *(t for name in OWN for t in (spans[name].start, spans[name].end))]
    assert edges == sorted(edges)
    assert spans["send"].end == whole.end
    assert spans["queue"].start == pytest.approx(whole.start, abs=1e-3)


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_through_the_openai_front(server: Traced, stream: bool) -> None:
    trace, client_span, header = new_trace()
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.openai}/v1", api_key="none")
    answer = client.chat.completions.create(
        model="pycode",
        messages=[{"role": "user", "content": "def main():"}],
        max_tokens=40,
        temperature=0.5,
        stream=stream,
        extra_headers={"traceparent": header},
    )
    if stream:
        for _ in answer:
            pass
    spans = server.sink.trace(trace, 2 + len(PARTS))
    check_tree(spans, "POST /v1/chat/completions", "chat pycode", client_span)
    assert spans["chat pycode"].kind == spans["POST /v1/chat/completions"].kind == SERVER
    assert spans["POST /v1/chat/completions"].about["http.response.status_code"] == 200
    about, rounds = spans["chat pycode"].about, spans["rounds"]
    assert about["gen_ai.operation.name"] == "chat"
    assert about["gen_ai.request.max_tokens"] == 40
    assert about["gen_ai.request.temperature"] == 0.5
    assert about["gen_ai.request.stream"] == stream
    assert ("gen_ai.response.time_to_first_chunk" in about) == stream
    tokens = about["gen_ai.usage.output_tokens"]
    assert about["gen_ai.response.finish_reasons"] in (["length"], ["stop"])
    # each round is there, and they make the text but for the prefill's token
    assert {name for name, _ in rounds.events} == {"round"}
    events = [event for _, event in rounds.events]
    counted = sum(event["dflash.rounds"] for event in events)
    assert counted == rounds.about["dflash.rounds"] == spans["verify"].about["dflash.steps"]
    assert sum(event["dflash.tokens"] for event in events) == tokens - 1
    total = rounds.about["dflash.drafted_tokens"]
    assert sum(event["dflash.drafted_tokens"] for event in events) == total
    seconds = spans["verify"].about["dflash.seconds"]
    assert 0 < seconds < spans["verify"].end - spans["verify"].start
    if not stream:
        assert answer.usage.prompt_tokens == about["gen_ai.usage.input_tokens"]
        assert answer.usage.completion_tokens == tokens
        assert answer.usage.rounds == counted


def post(server: Traced, path: str, body: object, header: str) -> None:
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.ports.http}{path}",
        json.dumps(body).encode(),
        {"traceparent": header},
    )
    with urllib.request.urlopen(request, timeout=WAIT) as answer:
        answer.read()


def test_plain_infer_and_generate_over_http(server: Traced) -> None:
    path, (trace, client_span, header) = "/v2/models/dflash/generate", new_trace()
    post(server, path, {"text_input": "def main():", "max_tokens": 20}, header)
    spans = server.sink.trace(trace, 2 + len(PARTS))
    check_tree(spans, f"POST {path}", "text_completion pycode", client_span)
    path, (trace, client_span, header) = "/v2/models/dflash_infer/infer", new_trace()
    inputs = [
        {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["def main():"]},
        {"name": "max_tokens", "shape": [1], "datatype": "INT32", "data": [20]},
    ]
    post(server, path, {"inputs": inputs}, header)
    spans = server.sink.trace(trace, 2 + len(PARTS))
    check_tree(spans, f"POST {path}", "text_completion pycode", client_span)


def test_a_client_of_grpc_names_its_trace(server: Traced) -> None:
    trace, client_span, header = new_trace()
    with Client(f"127.0.0.1:{server.ports.grpc}", headers={"traceparent": header}) as client:
        client.generate("def main():", max_tokens=20)
    name = "text_completion pycode"
    check_tree(server.sink.trace(trace, 1 + len(PARTS)), name, name, client_span)


def test_a_refused_request_says_so(server: Traced) -> None:
    path, (trace, _, header) = "/v2/models/dflash_infer/infer", new_trace()
    inputs = [{"name": "max_tokens", "shape": [1], "datatype": "INT32", "data": [20]}]
    with pytest.raises(urllib.error.HTTPError):
        post(server, path, {"inputs": inputs}, header)
    spans = server.sink.trace(trace, 2)
    assert spans[f"POST {path}"].about["http.response.status_code"] == 400
    assert spans["text_completion pycode"].failed
    assert spans["text_completion pycode"].about["error.type"] == "INVALID_ARG"


def test_what_a_client_does_not_sample_is_not_traced(server: Traced) -> None:
    trace, _, header = new_trace(sampled=False)
    body = {"text_input": "def main():", "max_tokens": 20}
    post(server, "/v2/models/dflash/generate", body, header)
    other, _, header = new_trace()
    post(server, "/v2/models/dflash/generate", body, header)
    server.sink.trace(other, 2 + len(PARTS))  # came after it
    assert server.sink.count(trace) == 0


def test_triton_s_own_spans_lie_between(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its version allows; this one does for a few requests."""
    monkeypatch.setattr(launch, "TRACES_FROM", ())
    ports, port = free_ports(), free_ports().http
    with open_sink() as sink, ExitStack() as stack:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", sink.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        triton, gateway = prepare(stack, built, ports, Security(), port)
        stack.enter_context(triton)
        gateway.start(triton.log)
        triton.wait_ready()
        gateway.tell("ready")
        server = Traced(ports, port, sink)
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
        messages: Any = [{"role": "user", "content": "def main():"}]

        def chat(header: str) -> None:
            client.chat.completions.create(
                model="pycode",
                messages=messages,
                max_tokens=20,
                extra_headers={"traceparent": header},
            )

        def generate(header: str) -> None:
            body = {"text_input": "def main():", "max_tokens": 20}
            post(server, "/v2/models/dflash/generate", body, header)

        roads = (
            (chat, "POST /v1/chat/completions", "chat pycode"),
            (generate, "POST /v2/models/dflash/generate", "text_completion pycode"),
        )
        for road, top, request in roads:
            skipped, _, header = new_trace(sampled=False)
            road(header)
            trace, client_span, header = new_trace()
            road(header)
            spans = sink.trace(trace, 5 + len(PARTS))
            lineage = [spans[name] for name in (top, "InferRequest", "dflash", request)]
            assert [each.parent for each in lineage] == [client_span, *(s.id for s in lineage[:-1])]
            assert {each.service for each in spans.values()} == {"dflash-trt"}
            assert sink.count(skipped) == 0


def test_a_sink_that_never_answers_costs_nobody_an_answer(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold, ports = threading.Event(), free_ports()
    with open_sink(hold) as sink:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", sink.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
        monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "32")  # full after a few requests
        monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "8")
        with (
            serving(built, ports) as (process, _),
            Client(f"127.0.0.1:{ports.grpc}", retries=0) as client,
        ):
            for _ in range(12):
                assert client.generate("def main():", max_tokens=8, timeout=WAIT).text
            process.send_signal(signal.SIGTERM)
            assert process.wait(WAIT) == 0
            hold.set()


# --- in one process ------------------------------------------------------------------------------


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    kept, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    monkeypatch.setattr(tracing, "tracer", lambda: provider.get_tracer("test"))
    return kept


def ended(spans: InMemorySpanExporter, count: int) -> dict[str, ReadableSpan]:
    wait_until(lambda: len(spans.get_finished_spans()) >= count)
    found = spans.get_finished_spans()
    assert len(found) == count, [span.name for span in found]
    return {span.name: span for span in found}


def test_a_long_text_has_several_rounds_in_an_event(spans: InMemorySpanExporter) -> None:
    with open_front(CountingModel(), max_seq_len=2000) as front:
        output, _ = ask(front, max_tokens=1200, ignore_eos=True).next()
        rounds = ended(spans, 1 + len(PARTS))["rounds"]
    assert output.rounds == [300]
    events = [dict(event.attributes or {}) for event in rounds.events]
    assert len(events) <= request_trace.MOST_EVENTS
    assert sum(event["dflash.rounds"] for event in events) == 300
    assert sum(event["dflash.tokens"] for event in events) == 1199
    times = [event.timestamp for event in rounds.events]
    assert times == sorted(times)
    assert rounds.start_time <= times[0] <= times[-1] == rounds.end_time


def test_each_choice_has_its_own(spans: InMemorySpanExporter) -> None:
    with open_front(CountingModel()) as front:
        ask(front, n=2, max_tokens=10).next()
        request = ended(spans, 1 + 2 * len(PARTS))["text_completion dflash"]
    assert request.attributes is not None
    assert request.attributes["gen_ai.request.choice.count"] == 2
    assert request.attributes["gen_ai.usage.output_tokens"] == 20
    choices = [(s.attributes or {}).get("dflash.choice") for s in spans.get_finished_spans()]
    assert choices.count(0) == choices.count(1) == len(PARTS)


@pytest.mark.parametrize("how", ["cancelled", "failing"])
def test_a_request_that_fails_ends_its_trace(spans: InMemorySpanExporter, how: str) -> None:
    model = CountingModel()
    with open_front(model) as front:
        if how == "failing":
            model.error = ValueError("a broken round")
            ask(front, max_tokens=10).next()
        else:
            model.pause.clear()
            reply = ask(front, max_tokens=10)
            wait_until(lambda: reply.asked > 0)
            reply.gone.set()
            reply.next()
            model.pause.set()
        found = ended(spans, 4)
    assert found.keys() == {"text_completion dflash", "queue", "prefill", "send"}
    request = found["text_completion dflash"]
    assert request.status.status_code is StatusCode.ERROR
    expected = {"failing": "INTERNAL", "cancelled": "CANCELLED"}[how]
    assert (request.attributes or {})["error.type"] == expected


def test_where_it_is_off_nothing_is_imported() -> None:
    """Neither by the gateway nor by a request."""
    script = """
import sys
import dflash_trt.serving.gateway.run
from fronts import CountingModel, ask, open_front
with open_front(CountingModel()) as front:
    assert ask(front, max_tokens=10).next()[1]
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
"""
    run = [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path}\n{script}"]
    subprocess.run(run, check=True, timeout=WAIT)


def test_an_old_triton_is_not_told_to_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "server_version", lambda _: version)
    version = (2, 73)
    assert launch._trace_arguments(Path("tritonserver")) == []  # off
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://a")
    assert "--trace-config=rate=0" in launch._trace_arguments(Path("tritonserver"))
    version = (2, 51)
    assert launch._trace_arguments(Path("tritonserver")) == []


@pytest.mark.parametrize(
    ("variables", "url"),
    [
        ({}, None),
        ({"EXPORTER_OTLP_ENDPOINT": "http://a:4318/"}, "http://a:4318/v1/traces"),
        ({"EXPORTER_OTLP_TRACES_ENDPOINT": "http://a/x"}, "http://a/x"),
        ({"EXPORTER_OTLP_ENDPOINT": "http://a", "SDK_DISABLED": "True"}, None),
        ({"EXPORTER_OTLP_ENDPOINT": "http://a", "TRACES_EXPORTER": "none"}, None),
        ({"EXPORTER_OTLP_ENDPOINT": "http://a", "TRACES_EXPORTER": "otlp"}, "http://a/v1/traces"),
    ],
)
def test_where_spans_go(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], url: str | None
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"OTEL_{name}", value)
    assert tracing.endpoint() == url


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "Make it http/protobuf"),
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "100000", "no traces: max_export_batch_size"),
    ],
)
def test_what_it_cannot_do_is_one_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    value: str,
    said: str,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv(name, value)
    provider = tracing._provider
    provider.cache_clear()
    assert provider() is None
    provider.cache_clear()
    assert said in caplog.text

"""What traces cost a round: the same texts with a sampled trace and without, in turns.

    [DFLASH_TRT_BENCH_BUILD=DIR] python -m pytest tests/benchmarks/bench_tracing.py -o addopts= -s

`test_processor_time` counts what the process of the model `dflash` computes for it, spans and their
protobuf included, which other processes on the machine do not change; `test_rounds` has a server
send its spans to a sink in this process, of the demo pair or of the build that is given, for at
most `SECONDS` each; of the latter the rounds are plain ones. Bar: 2 % of a round.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import demo_pair
import pytest
from fronts import CountingModel, ask, open_front
from live import serving
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from otlp_sink import Sink, open_sink

from dflash_trt.serving import tracing
from dflash_trt.serving.client import Client
from dflash_trt.serving.ports import LOOPBACK, free_ports

BUILD = os.environ.get("DFLASH_TRT_BENCH_BUILD")
WARM_UP, TURNS, SECONDS = 1 if BUILD else 5, 60, 60.0
LONG: Any = {"max_tokens": 256, "ignore_eos": True}
if BUILD:  # plain rounds are the shortest, and all alike: no policy learns between two texts
    LONG |= {"max_tokens": 48, "drafting": False}
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
BAR = 1.02
ROUNDS = 100  # of a text in `test_processor_time`


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest) -> Iterator[tuple[str, Sink]]:
    built = Path(BUILD) if BUILD else request.getfixturevalue("built")
    ports = free_ports()
    with ExitStack() as stack:
        sink = stack.enter_context(open_sink())
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", sink.url)
            stack.enter_context(serving(built, ports))
        yield f"{LOOPBACK}:{ports.grpc}", sink


class Encoding(SpanExporter):
    """Does all that the exporter does, but send."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        encode_spans(spans).SerializeToString()
        return SpanExportResult.SUCCESS


@pytest.mark.parametrize("sequences", [1, 8])
def test_processor_time(sequences: int, monkeypatch: pytest.MonkeyPatch) -> None:
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(Encoding()))
    own: dict[bool, Any] = {False: None, True: provider.get_tracer("bench")}
    spent: dict[bool, list[float]] = {False: [], True: []}
    with open_front(CountingModel(), max_seq_len=2000, slots=8, max_queue=8) as front:
        for turn in range(2 * (WARM_UP + TURNS)):
            traced = bool((turn + turn // 2) % 2)  # neither is always first
            monkeypatch.setattr(tracing, "tracer", lambda traced=traced: own[traced])
            begun = time.process_time()
            output, _ = ask(front, n=sequences, max_tokens=ROUNDS * 4 + 1, ignore_eos=True).next()
            provider.force_flush()
            rounds = max(output.rounds)
            assert rounds == ROUNDS
            if turn >= 2 * WARM_UP:
                spent[traced].append((time.process_time() - begun) / rounds)
    off, on = (1e6 * median(spent[traced]) for traced in (False, True))
    demo_pair.show(
        f"Processor time of the front, {sequences} sequences of {ROUNDS} rounds",
        [f"without: {off:.0f} us a round", f"traces:  {on - off:.1f} us more ({TURNS} turns)"],
    )
    assert on - off < 500 * sequences


@pytest.mark.parametrize("streams", [1, 8])
def test_rounds(server: tuple[str, Sink], streams: int) -> None:
    address, sink = server
    clients = {
        flag: Client(address, headers={"traceparent": f"00-{TRACE}-00f067aa0ba902b7-{flag}"})
        for flag in ("00", "01")
    }

    def text(client: Client) -> int:
        *_, last = client.stream("def main():", **LONG)
        assert last.final is not None
        return last.final.rounds

    ratios, off, deadline = [], [], time.monotonic() + SECONDS
    with ThreadPoolExecutor(streams) as pool:
        for turn in range(WARM_UP + TURNS):
            if ratios and time.monotonic() > deadline:
                break
            took = {}
            for flag in sorted(clients, reverse=bool(turn % 2)):  # neither is always first
                begun = time.perf_counter()
                rounds = max(pool.map(text, [clients[flag]] * streams))
                took[flag] = (time.perf_counter() - begun) / rounds
            if turn >= WARM_UP:
                off.append(took["00"])
                ratios.append(took["01"] / took["00"])
    for client in clients.values():
        client.close()
    assert sink.count(TRACE) >= len(ratios) * streams > 0  # they did come
    demo_pair.show(
        f"Rounds with a trace, {streams} streams (bar: {BAR})",
        [
            f"a round without: {1000 * median(off):.2f} ms",
            f"with, in turns:  {demo_pair.spread(ratios)} of it (median of {len(ratios)} pairs)",
        ],
    )
    demo_pair.hold("a round with a trace", ratios, most=BAR)

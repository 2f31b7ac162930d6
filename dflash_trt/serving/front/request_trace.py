"""The spans of a request: queue, prefill, rounds with the engines' share, send.

A span costs 0.04 ms, an event in it half of that, so a round is an event, noted as a tuple where it
is decoded; spans are made when the request has been answered, in the thread that sent it.
"""

import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from dflash_trt.decoding import Sequence, StepReport
from dflash_trt.serving import tracing
from dflash_trt.serving.front.output_processor import OutputProcessor

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

MOST_EVENTS = 16  # of a text; in longer ones an event is of several rounds
SAMPLING = ("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty")


class _Step(NamedTuple):
    """A step of a sequence, and what it has after it."""

    at: float  # time.monotonic()
    report: StepReport
    tokens: int
    drafted: int


class RequestTrace:
    """A request that is traced, from its coming to its answer."""

    def __init__(self, tracer: "Tracer", span: "Span", received: float, shift: int) -> None:
        self._tracer, self._span, self._received, self._shift = tracer, span, received, shift
        self._steps: dict[Sequence, list[_Step]] = {}

    def follow(self, sequences: Seq[Sequence]) -> None:
        """Notes the steps of its choices from now on."""
        for sequence in sequences:
            steps = self._steps[sequence] = list[_Step]()
            sequence.watch = partial(_note, sequence, steps)

    def end(
        self, choices: Seq[OutputProcessor], streaming: bool, failure: tuple[str, str] | None
    ) -> None:
        """It was answered; failure: code and message."""
        from opentelemetry.trace import StatusCode  # noqa: PLC0415

        now, span = time.monotonic(), self._span
        if failure:
            span.set_attribute("error.type", failure[0])
            span.set_status(StatusCode.ERROR, failure[1])
        if choices:
            span.set_attributes(_about(choices, streaming, self._received))
        for choice in choices:
            self._choice(choice, now, {"dflash.choice": choice.index} if choices[1:] else {})
        span.end(_ns(now, self._shift))

    def _choice(self, choice: OutputProcessor, now: float, own: Mapping[str, Any]) -> None:
        sequence = choice.sequence
        steps, started = list(self._steps[sequence]), sequence.started
        self._part("queue", self._received, started or now, own)
        if started is None:
            return
        first = steps[0].at if steps else choice.first_token or now
        last = steps[-1].at if steps else choice.last_token or now
        prompt, cached = len(sequence.request.prompt), sequence.cached_tokens
        about = {**own, "dflash.prompt_tokens": prompt, "dflash.cached_tokens": cached}
        self._part("prefill", started, first, about)
        if sequence.rounds:
            self._rounds(sequence, steps, first, last, own)
        self._part("send", last, now, own)

    def _rounds(
        self,
        sequence: Sequence,
        steps: Seq[_Step],
        first: float,
        last: float,
        own: Mapping[str, Any],
    ) -> None:
        totals = {
            "dflash.rounds": sequence.rounds,
            "dflash.drafted_tokens": sequence.drafted,
            "dflash.accepted_tokens": sequence.accepted,
            "dflash.acceptance_length": sequence.acceptance_length,
        }
        size = -(-len(steps) // MOST_EVENTS)
        events = [(steps[i : i + size], steps[i - 1]) for i in range(1, len(steps), size or 1)]
        span = self._part("rounds", first, last, {**own, **totals}, events=events)
        if not events:  # TensorRT-LLM ran them
            return
        begin = steps[1].at - steps[1].report.round_trip
        for engine in ("verify", "draft"):  # from its first step to its last
            seconds = sum(getattr(step.report, engine) for step in steps[1:])
            about = {**own, "dflash.steps": len(steps) - 1, "dflash.seconds": seconds}
            self._part(engine, begin, last, about, within=span)

    def _part(
        self,
        name: str,
        start: float,
        end: float,
        about: Mapping[str, Any],
        within: "Span | None" = None,
        events: Seq[tuple[Seq[_Step], _Step]] = (),
    ) -> "Span":
        """A span that has ended."""
        from opentelemetry.trace import set_span_in_context  # noqa: PLC0415

        context = set_span_in_context(within or self._span)
        began = _ns(start, self._shift)
        span = self._tracer.start_span(name, context, attributes=about, start_time=began)
        for some, before in events:
            span.add_event("round", _event(some, before), _ns(some[-1].at, self._shift))
        span.end(_ns(max(start, end), self._shift))
        return span


def begin(
    model: str, chat: bool, context: Mapping[str, Any], received: float
) -> RequestTrace | None:
    """None where tracing is off or this request is not sampled.

    model: its name; context: the request's parameters; received: `time.monotonic()`.
    """
    if (tracer := tracing.tracer()) is None:
        return None
    from opentelemetry.trace import SpanKind  # noqa: PLC0415

    operation = "chat" if chat else "text_completion"
    about = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "dflash-trt",
        "gen_ai.request.model": model,
    }
    shift = time.time_ns() - time.monotonic_ns()  # one for all spans: none may begin before its own
    began, within = _ns(received, shift), tracing.parent(context)
    name = f"{operation} {model}"
    span = tracer.start_span(name, within, SpanKind.SERVER, about, start_time=began)
    return RequestTrace(tracer, span, received, shift) if span.is_recording() else None


def _ns(moment: float, shift: int) -> int:
    """Of the clock that everybody has; moment: `time.monotonic()`, shift: from it, ns."""
    return int(moment * 1e9) + shift


def _note(sequence: Sequence, steps: list[_Step], report: StepReport) -> None:
    steps.append(_Step(time.monotonic(), report, len(sequence.tokens), sequence.drafted))


def _event(some: Seq[_Step], before: _Step) -> dict[str, Any]:
    """What some rounds did after the step `before`."""
    last = some[-1]
    return {
        "dflash.rounds": len(some),
        "dflash.tokens": last.tokens - before.tokens,
        "dflash.drafted_tokens": last.drafted - before.drafted,
        "dflash.verify_seconds": sum(step.report.verify for step in some),
        "dflash.draft_seconds": sum(step.report.draft for step in some),
    }


def _about(choices: Seq[OutputProcessor], streaming: bool, received: float) -> dict[str, Any]:
    """Attributes of the semantic conventions for generative AI."""
    sequences = [choice.sequence for choice in choices]
    request, sampling = sequences[0].request, sequences[0].request.sampling
    about = {
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.stream": streaming,
        **{f"gen_ai.request.{name}": float(getattr(sampling, name)) for name in SAMPLING},
        "gen_ai.response.finish_reasons": [each.finish_reason or "error" for each in sequences],
        "gen_ai.usage.input_tokens": len(request.prompt),
        "gen_ai.usage.cache_read.input_tokens": sequences[0].cached_tokens,
        "gen_ai.usage.output_tokens": sum(len(each.tokens) for each in sequences),
    }
    if choices[1:]:
        about["gen_ai.request.choice.count"] = len(choices)
    if streaming and (first := choices[0].first_token):
        about["gen_ai.response.time_to_first_chunk"] = first - received
    return about

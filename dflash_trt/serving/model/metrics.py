"""Prometheus metrics of the public model, on Triton's endpoint; docs/serving.md lists them.

`prometheus_client` adds them up. One thread sends what has changed to Triton once an interval,
because a call of `pb.Metric` costs tens of microseconds in two processes, and concurrent calls
crash the server. A histogram is sent as counters: Triton takes its values only one by one.
"""

import logging
import threading
from collections import Counter as Tally
from collections.abc import Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from dflash_trt.speculation import VERIFIED

log = logging.getLogger(__name__)

INTERVAL = 1.0  # seconds between two sends
CLOSE_TIMEOUT = 2.0  # seconds

PHASES = ("verify", "draft", "hop", "scheduler")
REASONS = ("stop", "length", "cancelled", "error", "refused")

DRAFT_TOKENS = "trtllm_spec_decode_num_draft_tokens_total"
ACCEPTED_TOKENS = "trtllm_spec_decode_num_accepted_tokens_total"
DRAFTED_AT = "trtllm_spec_decode_drafted_tokens_total"
ACCEPTED_AT = "trtllm_spec_decode_accepted_tokens_total"
ACCEPTANCE_LENGTH = "dflash_acceptance_length"
REQUEST_ACCEPTANCE = "dflash_request_acceptance_length"
ROUNDS = "dflash_rounds_total"
CHOICES = "dflash_choices_total"
ROUND_SECONDS = "dflash_round_seconds_total"
PROMPT_TOKENS = "trtllm_prompt_tokens_total"
PREFILL_SECONDS = "dflash_prefill_seconds_total"
GENERATION_TOKENS = "trtllm_generation_tokens_total"
QUEUE_TIME = "trtllm_request_queue_time_seconds"
FIRST_TOKEN = "trtllm_time_to_first_token_seconds"
INTER_TOKEN = "dflash_inter_token_latency_seconds"
REQUESTS = "dflash_requests_total"
ACTIVE = "trtllm_num_requests_running"
WAITING = "trtllm_num_requests_waiting"
KV_ROWS = "dflash_kv_rows_used"
CACHED_TOKENS = "dflash_cached_prompt_tokens_total"
CACHE_BYTES = "dflash_prefix_cache_bytes"
# known only if this server runs the rounds
OF_ROUNDS = (ROUNDS, CHOICES, ROUND_SECONDS, PREFILL_SECONDS, KV_ROWS, CACHE_BYTES)

# bucket bounds, in seconds below
MEANS = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 12.0)  # tokens; texts differ most at the start
GAPS = tuple(n * 10.0**e for e in range(-4, 1) for n in (1.0, 2.5, 5.0))[:-1]
WAITS = (*GAPS[3:], 5.0, 10.0, 25.0, 60.0, 120.0, 300.0)


def families(registry: CollectorRegistry, max_drafts: int, rounds: bool = True) -> dict[str, Any]:
    """Return metrics by name, at 0; max_drafts: per sequence in a round; rounds: of this server."""
    positions = tuple(map(str, range(max_drafts)))
    committed = "Tokens a sequence committed in a round: accepted drafts and the bonus token"
    of_text = "Tokens committed in a round, the mean of a text that ended"
    # the last column: a counter's label and its values, or a histogram's bounds
    table: tuple[tuple[Any, ...], ...] = (
        (Counter, DRAFT_TOKENS, "tokens", "Draft tokens proposed"),
        (Counter, ACCEPTED_TOKENS, "tokens", "Draft tokens accepted"),
        (Counter, DRAFTED_AT, "tokens", "Drafts proposed here", ("token_position", positions)),
        (Counter, ACCEPTED_AT, "tokens", "Drafts accepted here", ("token_position", positions)),
        (Histogram, ACCEPTANCE_LENGTH, "tokens", committed, range(1, max_drafts + 2)),
        (Histogram, REQUEST_ACCEPTANCE, "tokens", of_text, MEANS),
        (Counter, ROUNDS, "rounds", "Rounds of verify and draft, each of all sequences"),
        (Counter, CHOICES, "rounds", "Rounds of single sequences", ("verified", VERIFIED)),
        (Counter, ROUND_SECONDS, "seconds", "Time in rounds, by phase", ("phase", PHASES)),
        (Counter, PROMPT_TOKENS, "tokens", "Prompt tokens processed"),
        (Counter, CACHED_TOKENS, "tokens", "Those of them that were reused, not computed"),
        (Counter, PREFILL_SECONDS, "seconds", "Time in prompt chunks"),
        (Counter, GENERATION_TOKENS, "tokens", "Tokens committed and given to requests"),
        (Histogram, QUEUE_TIME, "seconds", "From a request to its first chunk", WAITS),
        (Histogram, FIRST_TOKEN, "seconds", "From a request to its first token", WAITS),
        (Histogram, INTER_TOKEN, "seconds", "Between two tokens of a request", GAPS),
        (Counter, REQUESTS, "requests", "Requests ended", ("finished_reason", REASONS)),
        (Gauge, ACTIVE, "requests", "Sequences that hold a slot"),
        (Gauge, WAITING, "requests", "Sequences that wait for a slot"),
        (Gauge, KV_ROWS, "entries", "KV entries in use, one per token of a sequence"),
        (Gauge, CACHE_BYTES, "bytes", "KV cache kept for prompts to come"),
    )
    metrics: dict[str, Any] = {}
    for kind, name, unit, about, *more in table:
        if name in OF_ROUNDS and not rounds:
            continue
        options = {"buckets": more[0]} if kind is Histogram else {}
        label, values = more[0] if more and kind is Counter else ("", ())
        labels = [label] if label else []
        metrics[name] = kind(name, f"{about} ({unit})", labels, registry=registry, **options)
        for value in values:
            metrics[name].labels(value)  # there before anything is counted
    return metrics


class Metrics:
    """Collects numbers from any thread and sends them from its own; times in seconds.

    No method waits for Triton. If sending fails, metrics stop with a log entry.
    """

    def __init__(self, backend_utils: Any, max_drafts: int, rounds: bool = True) -> None:
        self._backend_utils = backend_utils
        self._registry = CollectorRegistry()
        self._families = families(self._registry, max_drafts, rounds)
        self.progress = 0  # prompt and generated tokens processed since the start
        self._sequences = Tally[tuple[int, int]]()  # not yet counted: see `count_drafts`
        self._lock = threading.Lock()  # of the last two
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def _add(self, name: str, amount: float = 1.0, label: str = "") -> None:
        family = self._families[name]
        # a difference of two clocks may be negative
        (family.labels(label) if label else family).inc(max(0.0, amount))

    def count_round(
        self,
        *,
        verify: float,
        draft: float,
        hop: float,
        scheduler: float,
        sequences: Sequence[tuple[int, int]],
        choices: Sequence[str],
    ) -> None:
        """Count one round; choices: kind verified for each of its sequences."""
        self.count_drafts(sequences)
        self._add(ROUNDS)
        for choice in choices:
            self._add(CHOICES, 1, choice)
        for phase, seconds in zip(PHASES, (verify, draft, hop, scheduler), strict=True):
            self._add(ROUND_SECONDS, seconds, phase)

    def count_drafts(self, sequences: Sequence[tuple[int, int]]) -> None:
        """Count (drafts, accepted drafts) of each sequence in a round."""
        with self._lock:
            self._sequences.update(sequences)

    def count_prefill(self, *, tokens: int, seconds: float) -> None:
        self.count_prompt(tokens)
        self._add(PREFILL_SECONDS, seconds)

    def count_prompt(self, tokens: int) -> None:
        self._add_tokens(PROMPT_TOKENS, tokens)

    def _add_tokens(self, name: str, count: int) -> None:
        with self._lock:
            self.progress += count
        self._add(name, count)

    def count_first_token(
        self, *, queue_seconds: float, first_token_seconds: float, cached_tokens: int = 0
    ) -> None:
        self._add_tokens(GENERATION_TOKENS, 1)
        self._add_tokens(PROMPT_TOKENS, cached_tokens)
        self._add(CACHED_TOKENS, cached_tokens)
        self._families[QUEUE_TIME].observe(queue_seconds)
        self._families[FIRST_TOKEN].observe(first_token_seconds)

    def count_tokens(self, count: int, seconds_since_last: float) -> None:
        self._add_tokens(GENERATION_TOKENS, count)
        for _ in range(count):
            self._families[INTER_TOKEN].observe(seconds_since_last / count)

    def count_end(self, reason: str, acceptance_length: float = 0.0) -> None:
        self._add(REQUESTS, 1, reason)
        if acceptance_length:  # 0: no rounds with drafts
            self._families[REQUEST_ACCEPTANCE].observe(acceptance_length)

    def set_gauges(
        self, *, active: int, waiting: int, kv_entries: int | None = None, cache_bytes: int = 0
    ) -> None:
        self._families[ACTIVE].set(active)
        self._families[WAITING].set(waiting)
        if kv_entries is not None:  # known
            self._families[KV_ROWS].set(kv_entries)
            self._families[CACHE_BYTES].set(cache_bytes)

    def close(self) -> None:
        """Send what is left and end the thread; Triton then drops the metrics."""
        self._closing.set()
        self._thread.join(CLOSE_TIMEOUT)

    def _run(self) -> None:
        try:
            series, closing = _Series(self._backend_utils), False
            series.send_changes(self._registry)  # all there before any request
            while not closing:
                closing = self._closing.wait(INTERVAL)
                self._pass_on_drafts()
                series.send_changes(self._registry)
        except Exception:
            log.exception("metrics are given up; requests are not affected")

    def _pass_on_drafts(self) -> None:
        with self._lock:
            sequences, self._sequences = self._sequences, Tally()
        for (drafted, accepted), times in sequences.items():
            self._add(DRAFT_TOKENS, drafted * times)
            self._add(ACCEPTED_TOKENS, accepted * times)
            for name, positions in ((DRAFTED_AT, drafted), (ACCEPTED_AT, accepted)):
                for position in range(positions):
                    self._add(name, times, str(position))
            for _ in range(times):
                self._families[ACCEPTANCE_LENGTH].observe(accepted + 1)


class _Series:
    """Triton's metric objects; made, used and dropped by one thread."""

    def __init__(self, backend_utils: Any) -> None:
        self._kinds = backend_utils.MetricFamily
        self._families: dict[str, Any] = {}  # keeps metrics alive, which end with their family
        self._metrics: dict[tuple[str, ...], Any] = {}  # by name and label values
        self._sent: dict[tuple[str, ...], float] = {}

    def send_changes(self, registry: CollectorRegistry) -> None:
        for family in registry.collect():
            # the widest bucket first: a scrape in between never sees one above a wider one
            for sample in reversed(family.samples):
                if not sample.name.endswith("_created"):
                    self._send(family, sample)

    def _send(self, family: Metric, sample: Sample) -> None:
        name, gauge = sample.name, family.type == "gauge"
        if name not in self._families:
            kind = self._kinds.GAUGE if gauge else self._kinds.COUNTER
            about = family.documentation
            self._families[name] = self._kinds(name=name, description=about, kind=kind)
        key = (name, *sample.labels.values())
        if key not in self._metrics:
            self._metrics[key] = self._families[name].Metric(labels=sample.labels)
        metric, change = self._metrics[key], sample.value - self._sent.get(key, 0.0)
        if gauge and change:
            metric.set(sample.value)
        elif change:
            metric.increment(change)
        self._sent[key] = sample.value

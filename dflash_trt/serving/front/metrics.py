"""Prometheus metrics of the public model, on Triton's endpoint; docs/serving.md lists them.

`pb.Metric` shapes this file: a call costs tens of microseconds in two processes, so values are
added up here and sent once an interval; concurrent calls crash the server, so one thread makes them
all; and a call that the server refuses may crash it, so values are checked first.
"""

import logging
import threading
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from dflash_trt.decoding.speculation import VERIFIED, CostProfile

log = logging.getLogger(__name__)

INTERVAL = 1.0  # seconds between two sends
CLOSE_TIMEOUT = 2.0  # seconds

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
TALLY = "histogram as counters"  # for thousands of values a second: see docs/serving.md

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
COST_SECONDS = "dflash_cost_seconds"
PROGRESS = (PROMPT_TOKENS, GENERATION_TOKENS)  # see `Metrics.progress`
# known only if this server runs the rounds
OF_ROUNDS = (
    *(ROUNDS, CHOICES, ROUND_SECONDS, PREFILL_SECONDS, KV_ROWS, COST_SECONDS, CACHE_BYTES),
)

# bucket bounds, in seconds below
MEANS = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 12.0)  # tokens; texts differ most at the start
GAPS = tuple(n * 10.0**e for e in range(-4, 1) for n in (1.0, 2.5, 5.0))[:-1]
WAITS = (*GAPS[3:], 5.0, 10.0, 25.0, 60.0, 120.0, 300.0)


@dataclass(frozen=True)
class Family:
    """A metric, with its first label's values or its bucket bounds."""

    name: str
    kind: str
    unit: str
    description: str
    label: str = ""
    values: tuple[str, ...] = ("",)
    more: tuple[str, ...] = ()  # labels of series that are made later, when their values are known
    buckets: tuple[float, ...] = ()


def families(max_drafts: int, rounds: bool = True) -> tuple[Family, ...]:
    """Return all metrics of a server; max_drafts: per sequence in a round.

    rounds: whether it runs the rounds itself; otherwise `OF_ROUNDS` are left out.
    """
    positions = ("token_position", tuple(map(str, range(max_drafts))))
    committed = "Tokens a sequence committed in a round: accepted drafts and the bonus token"
    by_kind = "Rounds of single sequences, by what was verified"
    cost = "A step with few tokens in the cache, as measured on this machine"
    of_text = "Tokens committed in a round, the mean of a text that ended"
    lengths = tuple(map(float, range(1, max_drafts + 2)))
    table = (
        Family(DRAFT_TOKENS, COUNTER, "tokens", "Draft tokens proposed"),
        Family(ACCEPTED_TOKENS, COUNTER, "tokens", "Draft tokens accepted"),
        Family(DRAFTED_AT, COUNTER, "tokens", "Draft tokens proposed, by position", *positions),
        Family(ACCEPTED_AT, COUNTER, "tokens", "Draft tokens accepted, by position", *positions),
        Family(ACCEPTANCE_LENGTH, TALLY, "tokens", committed, buckets=lengths),
        Family(REQUEST_ACCEPTANCE, HISTOGRAM, "tokens", of_text, buckets=MEANS),
        Family(ROUNDS, COUNTER, "rounds", "Rounds of verify and draft, each of all sequences"),
        Family(CHOICES, COUNTER, "rounds", by_kind, "verified", VERIFIED),
        Family(ROUND_SECONDS, COUNTER, "seconds", "Time in rounds, by phase", "phase", PHASES),
        Family(PROMPT_TOKENS, COUNTER, "tokens", "Prompt tokens processed"),
        Family(CACHED_TOKENS, COUNTER, "tokens", "Those of them that were reused, not computed"),
        Family(PREFILL_SECONDS, COUNTER, "seconds", "Time in prompt chunks"),
        Family(GENERATION_TOKENS, COUNTER, "tokens", "Tokens committed and given to requests"),
        *(
            Family(name, HISTOGRAM, "seconds", f"From a request to its first {what}", buckets=WAITS)
            for name, what in ((QUEUE_TIME, "chunk"), (FIRST_TOKEN, "token"))
        ),
        Family(INTER_TOKEN, TALLY, "seconds", "Between two tokens of a request", buckets=GAPS),
        Family(REQUESTS, COUNTER, "requests", "Requests ended", "finished_reason", REASONS),
        Family(ACTIVE, GAUGE, "requests", "Sequences that hold a slot"),
        Family(WAITING, GAUGE, "requests", "Sequences that wait for a slot"),
        Family(KV_ROWS, GAUGE, "rows", "Slots in use"),
        Family(CACHE_BYTES, GAUGE, "bytes", "KV cache kept for prompts to come"),
        Family(COST_SECONDS, GAUGE, "seconds", cost, "step", (), ("rows", "tokens")),
    )
    return tuple(each for each in table if rounds or each.name not in OF_ROUNDS)


def bounds(buckets: Sequence[float]) -> tuple[str, ...]:
    """Return bucket bounds as Prometheus writes them."""
    return (*(f"{bound:g}" for bound in buckets), "+Inf")


class _Tally:
    """A histogram added up locally: counts per bucket and the sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float, times: int) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


@dataclass
class _Pending:
    """What happened since the last send; its size does not grow with the number of rounds."""

    # by name and label value
    counts: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    gaps: _Tally = field(default_factory=lambda: _Tally(GAPS))
    acceptance: Counter[tuple[int, int]] = field(default_factory=Counter)  # see `drafted`
    gauges: dict[str, float] = field(default_factory=dict)
    costs: CostProfile | None = None
    observed: list[tuple[str, float]] = field(default_factory=list)  # three per request


class Metrics:
    """Collects numbers from any thread and sends them from its own; times in seconds.

    No method waits for Triton. If sending fails, metrics stop with a log entry.
    """

    def __init__(self, sink: Any, max_drafts: int, rounds: bool = True) -> None:
        """Start the thread; sink: `triton_python_backend_utils`; for the rest see `families`."""
        self._sink = sink
        self._families = families(max_drafts, rounds)
        self.progress = 0  # prompt and generated tokens processed since the start
        self._pending = _Pending()
        self._lock = threading.Lock()  # of _pending; held for additions only, never while sending
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def _add(self, *amounts: tuple[str, str, float]) -> None:
        """Add amounts, each with name and label value."""
        with self._lock:
            for name, label, amount in amounts:
                self._pending.counts[name, label] += amount
                if name in PROGRESS:
                    self.progress += int(amount)

    def round(
        self,
        *,
        verify: float,
        draft: float,
        hop: float,
        scheduler: float,
        sequences: Sequence[tuple[int, int]],
        choices: Sequence[str],
    ) -> None:
        """Count one round; sequences: see `drafted`; choices: kind verified for each."""
        self.drafted(sequences)
        phases = zip(PHASES, (verify, draft, hop, scheduler), strict=True)
        self._add(
            (ROUNDS, "", 1),
            *((CHOICES, choice, 1) for choice in choices),
            *((ROUND_SECONDS, phase, seconds) for phase, seconds in phases),
        )

    def drafted(self, sequences: Sequence[tuple[int, int]]) -> None:
        """Count (drafts, accepted drafts) of each sequence in a round."""
        with self._lock:
            self._pending.acceptance.update(sequences)

    def prefill(self, *, tokens: int, seconds: float) -> None:
        """Count one prompt chunk."""
        self.prompt(tokens)
        self._add((PREFILL_SECONDS, "", seconds))

    def prompt(self, tokens: int) -> None:
        """Count processed prompt tokens."""
        self._add((PROMPT_TOKENS, "", tokens))

    def started(self, *, queued: float, cached: int = 0) -> None:
        """Record a request's first token.

        queued: seconds it waited for a slot; cached: prompt tokens from the prefix cache.
        """
        self._add((GENERATION_TOKENS, "", 1))
        self._add((PROMPT_TOKENS, "", cached), (CACHED_TOKENS, "", cached))
        self._observe(QUEUE_TIME, queued)

    def first_token(self, seconds: float) -> None:
        """Record the time to first token; in a stream, until Triton has taken it."""
        self._observe(FIRST_TOKEN, seconds)

    def _observe(self, name: str, value: float) -> None:
        with self._lock:
            self._pending.observed.append((name, value))

    def tokens(self, count: int, seconds: float) -> None:
        """Count tokens of one request that came `seconds` after its previous ones."""
        if count:
            self._add((GENERATION_TOKENS, "", count))
            with self._lock:
                self._pending.gaps.add(seconds / count, count)

    def finished(self, reason: str, acceptance_length: float = 0.0) -> None:
        """Count an ended request; `reason` is one of REASONS.

        acceptance_length: of its text; 0: no rounds with drafts.
        """
        self._add((REQUESTS, reason, 1))
        if acceptance_length:
            self._observe(REQUEST_ACCEPTANCE, acceptance_length)

    def state(
        self, *, active: int, waiting: int, kv_rows: int | None = None, kept: int = 0
    ) -> None:
        """Set the gauges.

        kv_rows: slots in use, None if unknown; kept: bytes of the prefix cache.
        """
        rows = {} if kv_rows is None else {KV_ROWS: kv_rows, CACHE_BYTES: kept}
        with self._lock:
            self._pending.gauges = {ACTIVE: active, WAITING: waiting, **rows}

    def costs(self, costs: CostProfile) -> None:
        """Set the measured costs of rounds; called once."""
        with self._lock:
            self._pending.costs = costs

    def close(self) -> None:
        """Send what is pending and end the thread; Triton then drops the metrics."""
        self._closing.set()
        self._thread.join(CLOSE_TIMEOUT)

    def _run(self) -> None:
        try:
            series = _Series(self._sink, self._families)
            while not self._closing.wait(INTERVAL):
                series.send(self._take())
            series.send(self._take())
        except Exception:
            log.exception("metrics are given up; requests are not affected")
        while not self._closing.wait(INTERVAL):
            self._take()  # after a failure: keep pending data small

    def _take(self) -> _Pending:
        with self._lock:
            taken, self._pending = self._pending, _Pending()
        return taken


class _Series:
    """Triton's metric objects; made, used and dropped by one thread."""

    def __init__(self, sink: Any, table: Sequence[Family]) -> None:
        self._sink = sink
        self._families: dict[str, Any] = {}  # keeps metrics alive, which end with their family
        self._metrics: dict[tuple[str, str], Any] = {}  # by name and label value
        self._lengths = next(each.buckets for each in table if each.name == ACCEPTANCE_LENGTH)
        self._gauges: dict[str, float] = {}
        for each in table:
            if each.kind == TALLY:
                self._add(f"{each.name}_bucket", COUNTER, each, "le", bounds(each.buckets))
                self._add(f"{each.name}_sum", COUNTER, each)
                self._add(f"{each.name}_count", COUNTER, each)
            else:
                self._add(each.name, each.kind, each, each.label, each.values)

    def _add(
        self, name: str, kind: str, about: Family, label: str = "", values: Sequence[str] = ("",)
    ) -> None:
        kinds = self._sink.MetricFamily
        family = kinds(
            name=name,
            description=f"{about.description} ({about.unit})",
            kind=getattr(kinds, kind.upper()),
        )
        self._families[name] = family
        buckets: Mapping[str, Any] = {"buckets": list(about.buckets)} if kind == HISTOGRAM else {}
        for value in values:
            labels = {label: value} if label else {}
            self._metrics[name, value] = family.Metric(labels=labels, **buckets)

    def send(self, pending: _Pending) -> None:
        """Send everything: one call per changed series, three per request."""
        lengths = _Tally(self._lengths)
        for (drafted, accepted), times in pending.acceptance.items():
            lengths.add(accepted + 1, times)
            pending.counts[DRAFT_TOKENS, ""] += drafted * times
            pending.counts[ACCEPTED_TOKENS, ""] += accepted * times
            for name, positions in ((DRAFTED_AT, drafted), (ACCEPTED_AT, accepted)):
                for position in range(positions):
                    pending.counts[name, str(position)] += times
        for (name, label), amount in pending.counts.items():
            self._increment(name, label, amount)
        self._send_tally(ACCEPTANCE_LENGTH, lengths)
        self._send_tally(INTER_TOKEN, pending.gaps)
        for name, value in pending.observed:
            self._metrics[name, ""].observe(value)
        if pending.costs is not None:
            self._send_costs(pending.costs)
        for name, value in pending.gauges.items():
            if self._gauges.get(name) != value:
                self._metrics[name, ""].set(value)
        self._gauges |= pending.gauges

    def _send_tally(self, name: str, tally: _Tally) -> None:
        totals = list(accumulate(tally.counts))
        self._increment(f"{name}_sum", "", tally.sum)
        self._increment(f"{name}_count", "", totals[-1])
        # widest first: a scrape in between never sees a bucket above a wider one
        for label, total in zip(reversed(bounds(tally.bounds)), reversed(totals), strict=True):
            self._increment(f"{name}_bucket", label, total)

    def _send_costs(self, costs: CostProfile) -> None:
        """Set the costs of the shortest context."""
        seconds: dict[tuple[str, int, str], float] = {}
        for i, n in enumerate(costs.rows):
            seconds["draft", n, ""] = costs.draft_seconds[0][i]
            for width, verify in zip(costs.widths, costs.verify_seconds[0][i], strict=True):
                seconds["verify", n, str(width)] = verify
        for (step, n, tokens), value in seconds.items():
            key = COST_SECONDS, f"{step} {n} {tokens}"
            if key not in self._metrics:
                labels = {"step": step, "rows": str(n), "tokens": tokens}
                self._metrics[key] = self._families[COST_SECONDS].Metric(labels=labels)
            self._metrics[key].set(value)

    def _increment(self, name: str, label: str, amount: float) -> None:
        if amount > 0:  # a difference of two clocks may be negative, which Triton refuses
            self._metrics[name, label].increment(amount)

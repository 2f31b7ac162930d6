"""Prometheus metrics of the public model, on Triton's own endpoint; docs/metrics.md lists them.

Three properties of `pb.Metric` shape this file: a call costs tens of microseconds in two processes,
so values are added up here and sent once an interval; calls from two threads at once crash the
server, so one thread makes them all; and a call the server refuses may crash it, so none is made.
"""

import logging
import threading
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from dflash_trt.decoding.speculation import CostProfile
from dflash_trt.serving.front import metric_table as names
from dflash_trt.serving.front.metric_table import (
    COUNTER,
    HISTOGRAM,
    TALLY,
    Family,
    bounds,
    families,
)

log = logging.getLogger(__name__)

INTERVAL = 1.0  # seconds between two sends
CLOSE_TIMEOUT = 2.0  # seconds

PROGRESS = (names.PROMPT_TOKENS, names.GENERATION_TOKENS)  # see `Metrics.progress`


class _Tally:
    """A histogram added up here: how many values fell into each bucket, and their sum."""

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
    gaps: _Tally = field(default_factory=lambda: _Tally(names.GAPS))
    acceptance: Counter[tuple[int, int, int]] = field(default_factory=Counter)  # see `drafted`
    gauges: dict[str, float] = field(default_factory=dict)
    costs: CostProfile | None = None
    observed: list[tuple[str, float]] = field(default_factory=list)  # three per request


class Metrics:
    """Takes numbers from any thread and sends them from its own; times in seconds.

    No method waits for Triton. Metrics that cannot be sent are given up, with a log entry.
    """

    def __init__(self, sink: Any, max_drafts: int, rounds: bool = True) -> None:
        """sink: the module `triton_python_backend_utils`; the rest: see `families`."""
        self._sink = sink
        self._families = families(max_drafts, rounds)
        self.progress = 0  # tokens processed since the start, of prompts and generated
        self._pending = _Pending()
        self._lock = threading.Lock()  # of _pending; held for additions only, never for a send
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def _add(self, *amounts: tuple[str, str, float]) -> None:
        """Name, label value and amount of each."""
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
        sequences: Sequence[tuple[int, int, int]],
        choices: Sequence[str],
    ) -> None:
        """One round; sequences: see `drafted`; choices: what was verified of each."""
        self.drafted(sequences)
        phases = zip(names.PHASES, (verify, draft, hop, scheduler), strict=True)
        self._add(
            (names.ROUNDS, "", 1),
            *((names.CHOICES, choice, 1) for choice in choices),
            *((names.ROUND_SECONDS, phase, seconds) for phase, seconds in phases),
        )

    def drafted(self, sequences: Sequence[tuple[int, int, int]]) -> None:
        """Of each sequence in a round: drafts, depth of their tree, drafts accepted."""
        with self._lock:
            self._pending.acceptance.update(sequences)

    def prefill(self, *, tokens: int, seconds: float) -> None:
        """One prompt chunk."""
        self.prompt(tokens)
        self._add((names.PREFILL_SECONDS, "", seconds))

    def prompt(self, tokens: int) -> None:
        """Prompt tokens that were processed."""
        self._add((names.PROMPT_TOKENS, "", tokens))

    def started(self, *, queued: float, cached: int = 0) -> None:
        """A request has its first token.

        queued: the time it waited for a slot; cached: tokens of its prompt that were reused.
        """
        self._add((names.GENERATION_TOKENS, "", 1))
        self._add((names.PROMPT_TOKENS, "", cached), (names.CACHED_TOKENS, "", cached))
        self._observe(names.QUEUE_TIME, queued)

    def first_token(self, seconds: float) -> None:
        """From a request to its first token; in a stream, until Triton has taken it."""
        self._observe(names.FIRST_TOKEN, seconds)

    def _observe(self, name: str, value: float) -> None:
        with self._lock:
            self._pending.observed.append((name, value))

    def tokens(self, count: int, seconds: float) -> None:
        """`count` tokens of one request, `seconds` after its previous ones."""
        if count:
            self._add((names.GENERATION_TOKENS, "", count))
            with self._lock:
                self._pending.gaps.add(seconds / count, count)

    def finished(self, reason: str, acceptance_length: float = 0.0) -> None:
        """A request ended; `reason` is one of REASONS.

        acceptance_length: of its text; 0: it had no rounds that drafted.
        """
        self._add((names.REQUESTS, reason, 1))
        if acceptance_length:
            self._observe(names.REQUEST_ACCEPTANCE, acceptance_length)

    def state(
        self, *, active: int, waiting: int, kv_rows: int | None = None, kept: int = 0
    ) -> None:
        """What holds until the next call.

        kv_rows: slots in use, where they are known, and bytes of the prefix cache with them.
        """
        rows = {} if kv_rows is None else {names.KV_ROWS: kv_rows, names.CACHE_BYTES: kept}
        with self._lock:
            self._pending.gauges = {names.ACTIVE: active, names.WAITING: waiting, **rows}

    def costs(self, costs: CostProfile) -> None:
        """What steps cost; called once, when it is known."""
        with self._lock:
            self._pending.costs = costs

    def close(self) -> None:
        """Sends what is pending and ends the thread; Triton then drops the metrics."""
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
            self._take()  # given up: keep what is pending small

    def _take(self) -> _Pending:
        with self._lock:
            taken, self._pending = self._pending, _Pending()
        return taken


class _Series:
    """Triton's objects for the table; made, used and dropped by one thread."""

    def __init__(self, sink: Any, table: Sequence[Family]) -> None:
        self._sink = sink
        self._families: dict[str, Any] = {}  # a metric goes away with its family
        self._metrics: dict[tuple[str, str], Any] = {}  # by name and label value
        self._lengths = next(each.buckets for each in table if each.name == names.ACCEPTANCE_LENGTH)
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
        """Hands everything over: as many calls as series have changed, and three per request."""
        lengths = _Tally(self._lengths)
        for (drafted, depth, accepted), times in pending.acceptance.items():
            lengths.add(accepted + 1, times)
            pending.counts[names.DRAFT_TOKENS, ""] += drafted * times
            pending.counts[names.ACCEPTED_TOKENS, ""] += accepted * times
            for name, positions in ((names.DRAFTED_AT, depth), (names.ACCEPTED_AT, accepted)):
                for position in range(positions):
                    pending.counts[name, str(position)] += times
        for (name, label), amount in pending.counts.items():
            self._increment(name, label, amount)
        self._send_tally(names.ACCEPTANCE_LENGTH, lengths)
        self._send_tally(names.INTER_TOKEN, pending.gaps)
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
        # from the widest on: a scrape in between never sees a bucket above a wider one
        for label, total in zip(reversed(bounds(tally.bounds)), reversed(totals), strict=True):
            self._increment(f"{name}_bucket", label, total)

    def _send_costs(self, costs: CostProfile) -> None:
        """Those of the shortest context."""
        seconds: dict[tuple[str, int, str], float] = {}
        for i, n in enumerate(costs.rows):
            seconds["draft", n, ""] = costs.draft_seconds[0][i]
            for width, verify in zip(costs.widths, costs.verify_seconds[0][i], strict=True):
                seconds["verify", n, str(width)] = verify
        for (step, n, tokens), value in seconds.items():
            key = names.COST_SECONDS, f"{step} {n} {tokens}"
            if key not in self._metrics:
                labels = {"step": step, "rows": str(n), "tokens": tokens}
                self._metrics[key] = self._families[names.COST_SECONDS].Metric(labels=labels)
            self._metrics[key].set(value)

    def _increment(self, name: str, label: str, amount: float) -> None:
        if amount > 0:  # a difference of two clocks may be negative, and that is refused
            self._metrics[name, label].increment(amount)

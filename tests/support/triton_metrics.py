"""A stand-in for the metrics of `triton_python_backend_utils`.

It follows "Custom Metrics" of the Python backend's README (github.com/triton-inference-server/
python_backend) and what Triton 2.51 refuses when asked. What the contract does not allow raises and
is kept in `violations`, since a real server may crash on it.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

WAIT = 30.0
Labels = frozenset[tuple[str, str]]


class Triton:
    """A module with `MetricFamily`; `samples` is what /metrics would show."""

    def __init__(self) -> None:
        self.samples: dict[tuple[str, Labels], float] = {}
        self.kinds: dict[str, str] = {}
        self.label_names: dict[str, set[str]] = {}
        self.violations: list[str] = []
        self.calls = 0
        self.gate = threading.Event()  # a call waits until it is set, as one does on a busy server
        self.gate.set()
        self._busy = threading.Lock()
        triton = self

        class MetricFamily(_Family):
            def __init__(self, *, name: str, description: str, kind: str) -> None:
                super().__init__(triton, name, description, kind)

        self.MetricFamily = MetricFamily

    def value(self, name: str, **labels: str) -> float:
        return self.samples[name, frozenset(labels.items())]

    def require(self, allowed: bool, what: str) -> None:
        if not allowed:
            self.violations.append(what)
            raise RuntimeError(what)

    @contextmanager
    def call(self) -> Iterator[None]:
        self.require(self._busy.acquire(blocking=False), "two threads at once")
        try:
            self.calls += 1
            self.require(self.gate.wait(WAIT), "the gate never opened")
            yield
        finally:
            self._busy.release()


class _Family:
    COUNTER, GAUGE = "counter", "gauge"

    def __init__(self, triton: Triton, name: str, description: str, kind: str) -> None:
        with triton.call():
            triton.require(bool(description), f"{name} has no description")
            known = triton.kinds.setdefault(name, kind)
            triton.require(known == kind, f"{name} exists with different type")
        self._triton, self.name, self.kind = triton, name, kind

    def Metric(self, *, labels: dict[str, str]) -> _Metric:
        triton = self._triton
        with triton.call():
            strings = all(isinstance(text, str) for pair in labels.items() for text in pair)
            triton.require(strings, f"{self.name}: labels are not strings")
            names = triton.label_names.setdefault(self.name, set(labels))
            triton.require(names == set(labels), f"{self.name}: {set(labels)}, not {names}")
            metric = _Metric(self, labels)
            triton.samples.setdefault((self.name, metric.labels), 0.0)
        return metric


class _Metric:
    def __init__(self, family: _Family, labels: dict[str, str]) -> None:
        self._triton, self._name, self._kind = family._triton, family.name, family.kind
        self._family = weakref.ref(family)
        self.labels = frozenset(labels.items())

    def increment(self, value: float) -> None:
        with self._checked(value, "counter", "gauge"):
            negative = self._kind == "counter" and value < 0
            self._triton.require(not negative, f"{self._name}: increment by {value}")
            self._triton.samples[self._name, self.labels] += value

    def set(self, value: float) -> None:
        with self._checked(value, "gauge"):
            self._triton.samples[self._name, self.labels] = value

    @contextmanager
    def _checked(self, value: Any, *kinds: str) -> Iterator[None]:
        triton = self._triton
        with triton.call():
            triton.require(self._family() is not None, f"{self._name}: its family is gone")
            triton.require(self._kind in kinds, f"{self._name}: not for a {self._kind}")
            triton.require(math.isfinite(value), f"{self._name}: {value}")
            yield

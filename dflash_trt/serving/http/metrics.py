"""What `/metrics` shows: Triton's page with whole histograms, and the application's own metrics."""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from dflash_trt.serving.http import ServeState

BUCKET = "_bucket"
COMMENT = re.compile(r"# (HELP|TYPE) (\S+) (.*)")
SAMPLE = re.compile(r"(\w+)(?:\{(.*)\})? (\S+)")
BOUND = re.compile(r'le="([^"]+)"')


def own_metrics(state: ServeState, answers: Mapping[int, int]) -> str:
    """Return what only `serve` and the application know; answers: by HTTP status."""
    restarts = {"server": state.server_restarts, "application": state.application_restarts}
    ready = {"": int(state.phase == "ready")}
    return "".join(
        (
            _family("dflash_ready", "gauge", "Whether requests are taken, 1 or 0", "", ready),
            _family(
                "dflash_restarts_total",
                "counter",
                "Restarts since `serve` began, also those that failed",
                "process",
                restarts,
            ),
            _family(
                "dflash_http_requests_total",
                "counter",
                "HTTP requests answered, by status; 499: the client went first",
                "code",
                {str(code): number for code, number in sorted(answers.items())},
            ),
            _family(
                "dflash_log_lost_lines_total",
                "counter",
                "Lines of the log that could not be written: its reader or disk stood still",
                "",
                {"": state.lost_lines},
            ),
        )
    )


def _family(name: str, kind: str, about: str, label: str, values: Mapping[str, int]) -> str:
    lines = [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]
    for value, number in values.items():
        labels = f'{{{label}="{value}"}}' if label else ""
        lines.append(f"{name}{labels} {number}")
    return "\n".join(lines) + "\n"


@dataclass
class _Family:
    comments: list[str] = field(default_factory=list)
    samples: list[str] = field(default_factory=list)
    about: str = ""


def with_histograms(page: str) -> str:
    """Return Triton's page with `NAME_bucket`, `_sum` and `_count` as one histogram.

    Its Python models can give it counters only (`serving/model/metrics.py`).
    """
    families: defaultdict[str, _Family] = defaultdict(_Family)
    for line in page.splitlines():
        comment = COMMENT.fullmatch(line)
        if comment:
            family = families[comment[2]]
            family.comments.append(line)
            family.about = comment[3] if comment[1] == "HELP" else family.about
        elif sample := SAMPLE.fullmatch(line):
            families[sample[1]].samples.append(line)
    for name in [name for name in families if name.endswith(BUCKET)]:
        _join(families, name.removesuffix(BUCKET))
    lines = [line for family in families.values() for line in (*family.comments, *family.samples)]
    return "\n".join(lines) + "\n"


def _join(families: dict[str, _Family], name: str) -> None:
    buckets = families.pop(name + BUCKET)
    joined = _Family([f"# HELP {name} {buckets.about}", f"# TYPE {name} histogram"])
    joined.samples = sorted(buckets.samples, key=_bound)
    for part in ("_sum", "_count"):
        joined.samples += families.pop(name + part, _Family()).samples
    families[name] = joined


def _bound(line: str) -> float:
    bound = BOUND.search(line)
    return float(bound[1]) if bound else float("inf")

"""The metrics: what is counted, what it costs the caller, what Triton shows, and who queries it."""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import promql_parser as promql
import pytest
import yaml
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.parser import text_string_to_metric_families

from dflash_trt.serving.client import Client
from dflash_trt.serving.http.metrics import with_histograms
from dflash_trt.serving.model import metrics as module
from dflash_trt.serving.model.metrics import REASONS, Metrics, families
from dflash_trt.serving.ports import Ports
from dflash_trt.speculation import VERIFIED
from tests.support.request_tools import wait_until
from tests.support.triton_metrics import Triton

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "deploy" / "grafana" / "dflash.json"
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
OF_APPLICATION = {
    "dflash_build_info": {"build", "digest", "drafter", "engine_kind", "version"},
    "dflash_ready": set[str](),
    "dflash_restarts_total": {"process"},
    "dflash_http_requests_total": {"code"},
    "dflash_log_lost_lines_total": set[str](),
}
MOST_DRAFTS, MOST_SERVED = 7, 15
REGISTRY = CollectorRegistry()
FAMILIES = families(REGISTRY, MOST_DRAFTS)
WAIT = 30.0
PHASES: dict[str, float] = {"verify": 0.004, "draft": 0.002, "hop": 0.001, "scheduler": 0.0005}


@pytest.fixture
def triton() -> Iterator[Triton]:
    triton = Triton()
    yield triton
    assert triton.violations == []


def test_a_round_counts_every_sequence(triton: Triton) -> None:
    metrics = Metrics(triton, MOST_DRAFTS)
    for _ in range(2):
        metrics.count_round(
            **PHASES,
            sequences=[(7, 7), (7, 0), (3, 2), (0, 0)],
            choices=["lookup", "drafts", "drafts", "plain"],
        )
    metrics.close()
    assert triton.value("dflash_rounds_total") == 2
    assert triton.value("trtllm_spec_decode_num_draft_tokens_total") == 34
    assert triton.value("trtllm_spec_decode_num_accepted_tokens_total") == 18
    by_position = {
        name: [
            triton.value(f"trtllm_spec_decode_{name}_tokens_total", token_position=str(i))
            for i in range(MOST_DRAFTS)
        ]
        for name in ("drafted", "accepted")
    }
    assert by_position == {"drafted": [6, 6, 6, 4, 4, 4, 4], "accepted": [4, 4, 2, 2, 2, 2, 2]}
    # tau: 8, 1, 3 and 1 tokens
    assert triton.value("dflash_acceptance_length_count") == 8
    assert triton.value("dflash_acceptance_length_sum") == 26
    lengths = {n: triton.value("dflash_acceptance_length_bucket", le=f"{n}.0") for n in "12345678"}
    assert lengths == {"1": 4, "2": 4, "3": 6, "4": 6, "5": 6, "6": 6, "7": 6, "8": 8}
    assert triton.value("dflash_acceptance_length_bucket", le="+Inf") == 8
    for phase, seconds in PHASES.items():
        assert triton.value("dflash_round_seconds_total", phase=phase) == pytest.approx(2 * seconds)
    choices = {each: triton.value("dflash_choices_total", verified=each) for each in VERIFIED}
    assert choices == {"plain": 2, "drafts": 4, "lookup": 2, "grammar": 0}


def test_a_request_from_queue_to_end(triton: Triton) -> None:
    metrics = Metrics(triton, MOST_DRAFTS)
    metrics.set_gauges(active=0, waiting=1, kv_entries=0)
    metrics.count_prefill(tokens=512, seconds=0.25)
    metrics.count_prefill(tokens=88, seconds=0.05)
    metrics.count_first_token(queue_seconds=0.5, first_token_seconds=0.8)
    metrics.count_tokens(3, 0.006)
    metrics.count_tokens(0, 0.1)  # a round that gave a request nothing
    metrics.set_gauges(active=2, waiting=0, kv_entries=3)
    metrics.count_end("stop", acceptance_length=2.5)
    metrics.count_end("refused")
    metrics.close()
    assert triton.value("dflash_request_acceptance_length_sum") == 2.5
    assert triton.value("trtllm_prompt_tokens_total") == 600
    assert triton.value("dflash_prefill_seconds_total") == pytest.approx(0.3)
    assert triton.value("trtllm_request_queue_time_seconds_sum") == 0.5
    assert triton.value("trtllm_time_to_first_token_seconds_sum") == 0.8
    assert triton.value("trtllm_generation_tokens_total") == 4
    assert triton.value("dflash_inter_token_latency_seconds_count") == 3
    assert triton.value("dflash_inter_token_latency_seconds_sum") == pytest.approx(0.006)
    ended = {end: triton.value("dflash_requests_total", finished_reason=end) for end in REASONS}
    assert ended == {"stop": 1, "length": 0, "cancelled": 0, "error": 0, "refused": 1}
    assert triton.value("trtllm_num_requests_running") == 2
    assert triton.value("trtllm_num_requests_waiting") == 0
    assert triton.value("dflash_kv_rows_used") == 3


def test_nothing_is_lost_between_sends(triton: Triton, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INTERVAL", 0.0005)
    metrics = Metrics(triton, MOST_DRAFTS)
    for _ in range(20_000):
        metrics.count_round(**PHASES, sequences=[(7, 3), (7, 1)], choices=["drafts"] * 2)
        metrics.count_tokens(4, 0.01)
    metrics.close()
    assert triton.value("dflash_rounds_total") == 20_000
    assert triton.value("dflash_acceptance_length_sum") == 120_000
    assert triton.value("dflash_inter_token_latency_seconds_count") == 80_000


def test_a_caller_never_waits_for_triton(triton: Triton) -> None:
    triton.gate.clear()  # the server does not take calls
    metrics = Metrics(triton, MOST_DRAFTS)
    for _ in range(50_000):
        metrics.count_round(**PHASES, sequences=[(7, 3)], choices=["drafts"])
    triton.gate.set()
    metrics.close()
    assert triton.value("dflash_rounds_total") == 50_000
    assert triton.calls < 300  # added up: the calls do not grow with the rounds


def test_an_idle_server_is_left_alone(triton: Triton, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INTERVAL", 0.001)
    metrics = Metrics(triton, MOST_DRAFTS)
    metrics.set_gauges(active=1, waiting=0, kv_entries=1)
    wait_until(lambda: triton.samples.get(("dflash_kv_rows_used", frozenset())) == 1)
    calls = triton.calls
    for _ in range(20):
        metrics.set_gauges(active=1, waiting=0, kv_entries=1)
        time.sleep(0.002)
    metrics.close()
    assert triton.calls == calls


def test_a_clock_that_ran_backwards_is_not_sent(triton: Triton) -> None:
    metrics = Metrics(triton, MOST_DRAFTS)
    metrics.count_round(**{**PHASES, "hop": -0.001}, sequences=[(7, 3)], choices=["drafts"])
    metrics.close()
    assert triton.value("dflash_round_seconds_total", phase="hop") == 0
    assert triton.value("dflash_rounds_total") == 1


def test_metrics_that_triton_refuses_do_not_stop_the_caller(
    caplog: pytest.LogCaptureFixture,
) -> None:
    triton = Triton()
    triton.kinds["dflash_kv_rows_used"] = "counter"  # another model has the name
    metrics = Metrics(triton, MOST_DRAFTS)
    metrics.count_round(**PHASES, sequences=[(7, 3)], choices=["drafts"])
    wait_until(lambda: "metrics are given up" in caplog.text)
    metrics.count_round(**PHASES, sequences=[(7, 3)], choices=["drafts"])
    metrics.close()
    assert triton.violations == ["dflash_kv_rows_used exists with different type"]


def test_triton_shows_them_all(plain: Ports) -> None:
    """All have types and labels before anything is counted; then the answer's figures count."""
    url, registry = f"http://127.0.0.1:{plain.metrics}/metrics", CollectorRegistry()
    time.sleep(1.5)  # what other tests asked has been sent
    before, types = _samples(url)
    with Client(f"127.0.0.1:{plain.grpc}") as client:
        said = client.generate("def main():", max_tokens=20).choices[0]
    expected = {
        "dflash_requests_total,finished_reason=length": 1,
        "dflash_acceptance_length_bucket,le=+Inf": said.rounds,
        "dflash_request_acceptance_length_bucket,le=12.0": 1,
        "trtllm_spec_decode_num_accepted_tokens_total": said.accepted,
        "trtllm_time_to_first_token_seconds_bucket,le=300.0": 1,
        "dflash_inter_token_latency_seconds_count": 19,
        "dflash_kv_rows_used": 0,
    }

    def grown() -> dict[str, float]:
        found, _ = _samples(url)
        return {name: found[name] - before[name] for name in expected}

    wait_until(lambda: grown() == expected)
    served = families(registry, MOST_SERVED)
    own = {name for name in before if name.partition(",")[0] in OF_APPLICATION}
    assert {name.partition(",")[0] for name in own} == OF_APPLICATION.keys()
    assert len([name for name in own if name.startswith("dflash_build_info,")]) == 1
    ours = {_label(s) for f in registry.collect() for s in _kept(f.samples)}
    assert before.keys() - own == ours
    for name, family in served.items():
        assert types[name.removesuffix("_total")] == family._type


PAGE = """
# HELP a_seconds_count Between (seconds)
# TYPE a_seconds_count counter
a_seconds_count 3
# HELP b_total Others
# TYPE b_total counter
b_total{model="a",version="1"} 7
# HELP a_seconds_bucket Between (seconds)
# TYPE a_seconds_bucket counter
a_seconds_bucket{le="+Inf"} 3
a_seconds_bucket{le="10.0"} 2
a_seconds_bucket{le="0.5"} 1
# HELP a_seconds_sum Between (seconds)
# TYPE a_seconds_sum counter
a_seconds_sum 12.5
"""


def test_three_counters_become_a_histogram() -> None:
    others, histogram = text_string_to_metric_families(with_histograms(PAGE))
    assert (others.name, others.type, others.samples[0].value) == ("b", "counter", 7)
    assert (histogram.name, histogram.type) == ("a_seconds", "histogram")
    assert histogram.documentation == "Between (seconds)"
    values = [
        (each.name.removeprefix("a_seconds"), each.labels.get("le"), each.value)
        for each in histogram.samples
    ]
    assert values == [
        ("_bucket", "0.5", 1),
        ("_bucket", "10.0", 2),
        ("_bucket", "+Inf", 3),
        ("_sum", None, 12.5),
        ("_count", None, 3),
    ]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool comes with Prometheus")
def test_promtool_takes_the_page(plain: Ports) -> None:
    page = httpx.get(f"http://127.0.0.1:{plain.metrics}/metrics", timeout=WAIT).content
    command = ["promtool", "check", "metrics"]
    checked = subprocess.run(command, input=page, capture_output=True, timeout=WAIT)
    complaints = (checked.stdout + checked.stderr).decode().splitlines()
    assert [line for line in complaints if not line.startswith("nv_")] == []  # Triton's own names


def _samples(url: str) -> tuple[dict[str, float], dict[str, str]]:
    """Return the package's samples as {"name,label=value": number}, and the families' types."""
    parsed = list(text_string_to_metric_families(httpx.get(url, timeout=WAIT).text))
    ours = [family for family in parsed if family.name.startswith(("dflash_", "trtllm_"))]
    samples = {_label(sample): sample.value for family in ours for sample in family.samples}
    return samples, {family.name: family.type for family in ours}


def _label(sample: Any) -> str:
    # the parser gives every counter the suffix _total
    known = exported().keys() | OF_APPLICATION.keys()
    name = sample.name if sample.name in known else sample.name.removesuffix("_total")
    return ",".join([name, *(f"{key}={text}" for key, text in sample.labels.items())])


def test_the_table_in_the_docs_is_the_code() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| ([\w ]+) \| (\w+) \| (?:`(\w+)`[^|]*)?\|",
        (ROOT / "docs" / "serving.md").read_text(),
        re.MULTILINE,
    )
    table = []
    for name, family in FAMILIES.items():
        [about] = family.describe()
        label, unit = "".join(family._labelnames), about.documentation.split("(")[1].rstrip(")")
        table.append((name, about.type, unit, label))
    assert rows == table


def exported() -> dict[str, set[str]]:
    """Return every series name of the endpoint, with its labels."""
    samples = (each for family in REGISTRY.collect() for each in _kept(family.samples))
    return {each.name: {*each.labels} for each in samples}


def _kept(samples: Any) -> list[Any]:
    return [each for each in samples if not each.name.endswith("_created")]


SCRAPED = {"instance", "job", "namespace", "pod"}  # labels that Prometheus adds


def _check_query(query: str) -> set[str]:
    """Assert that a query's metrics are exported and counters read as rates; return them."""

    used: set[str] = set()

    def visit(node: Any, rated: bool) -> None:
        if isinstance(node, promql.MatrixSelector):
            return visit(node.vector_selector, True)
        if isinstance(node, promql.VectorSelector):
            assert node.name in series, f"{node.name} is not exported"
            labels = {matcher.name for matcher in node.matchers.matchers}
            assert labels <= series[node.name] | SCRAPED, f"{labels} of {node.name}"
            assert rated or node.name in gauges, f"{node.name} is a counter, read as it is"
            used.add(node.name)
        for child in ("expr", "lhs", "rhs"):
            if getattr(node, child, None) is not None:
                visit(getattr(node, child), rated)
        for argument in getattr(node, "args", []):
            visit(argument, rated)

    series = exported() | OF_APPLICATION | {"up": set()}
    gauges = {name for name, family in FAMILIES.items() if isinstance(family, Gauge)}
    gauges |= {"up", "dflash_ready"}
    visit(promql.parse(query), False)
    assert used
    return used


def test_the_dashboard_queries_what_is_exported_and_all_of_it() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    datasource, instance = dashboard["templating"]["list"]
    assert (datasource["name"], datasource["type"]) == ("datasource", "datasource")
    assert instance["definition"] == "label_values(dflash_requests_total, instance)"
    used: set[str] = set()
    places: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        assert panel["title"]
        assert panel["description"]
        area = panel["gridPos"]
        columns, rows = (range(area[at], area[at] + area[size]) for at, size in ("xw", "yh"))
        cells = {(x, y) for x in columns for y in rows}
        assert not places & cells, f"{panel['title']} lies on another panel"
        assert max(columns) < 24
        places |= cells
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == panel["datasource"]["uid"] == "${datasource}"
            used |= _check_query(target["expr"].replace("$__rate_interval", "1m"))
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    for family in (*FAMILIES, "dflash_restarts_total", "dflash_http_requests_total"):
        assert any(name.startswith(family) for name in used), f"no panel shows {family}"


def test_the_alerts_query_what_is_exported() -> None:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    documented = re.findall(r"^\| `(Dflash\w+)` \|", (ROOT / "docs/serving.md").read_text(), re.M)
    assert [rule["alert"] for rule in rules] == documented
    for rule in rules:
        assert rule.keys() == {"alert", "expr", "for", "labels", "annotations"}
        assert rule["annotations"].keys() == {"summary", "description"}
        assert rule["labels"]["severity"] in ("warning", "critical")
        _check_query(rule["expr"])


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool comes with Prometheus")
def test_the_alerts_fire_when_they_should() -> None:
    subprocess.run(
        ["promtool", "test", "rules", ROOT / "tests" / "alerts_test.yml"], check=True, timeout=WAIT
    )

"""`dflash-trt bench serve` against the real server, by every protocol."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from load import metric

from dflash_trt.bench.load import Goal, Load, measure_server, summarise
from dflash_trt.bench.page import to_html, to_markdown
from dflash_trt.bench.prompts import load_asked
from dflash_trt.bench.protocols import Answer, Ask, open_client
from dflash_trt.bench.results import Level, ServerRun
from dflash_trt.bench.server_report import server_page
from dflash_trt.build import build
from dflash_trt.cli import main
from dflash_trt.config import Source, load_config
from dflash_trt.decoding.check import check
from dflash_trt.errors import BenchError, RequestError
from dflash_trt.serving.chat import as_chat, load_encoding
from dflash_trt.serving.launch import Ports
from dflash_trt.serving.openai.run import openai_front
from dflash_trt.serving.server import free_ports, running_server

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "scripts"))
import peers  # noqa: E402

PYCODE = ROOT / "examples" / "pycode"
TEMPLATE = "{{ '<think>' if enable_thinking is not false }}# {{ messages[0].content }}\ndef "
TOKENS, REQUESTS = 20, 6
GOAL = Goal(first_token=0.5, inter_token=0.05)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Ports, str]]:
    """The demo pair with drafts of a fixed length, so that a text always has the same rounds."""
    directory = tmp_path_factory.mktemp("bench") / "built"
    target = Path(shutil.copytree(PYCODE / "target", directory.parent / "target"))
    (target / "chat_template.jinja").write_text(TEMPLATE)
    config = load_config(ROOT / "build_configs" / "pycode.yaml")
    changed = {
        "speculation": config.speculation.model_copy(update={"draft_tokens": 7}),
        "target": Source(path=target),
    }
    build(config.model_copy(update=changed), directory, lambda *_: None)
    with running_server(directory) as ports:
        port = free_ports().http
        with openai_front(directory, port, ports):
            yield ports, f"http://127.0.0.1:{port}/v1"


def committed(ports: Ports) -> tuple[float, float]:
    """Tokens and rounds by the server's own metrics, once they have come to rest."""
    found = (-1.0, -1.0)
    for _ in range(20):
        before, found = (
            found,
            (
                sum(metric(ports.metrics, "dflash_acceptance_length_sum").values()),
                sum(metric(ports.metrics, "dflash_acceptance_length_count").values()),
            ),
        )
        if before == found:
            return found
        time.sleep(1.5)  # they are sent once a second
    raise AssertionError("the metrics do not come to rest")


def asks() -> list[Ask]:
    lines = (PYCODE / "prompts.jsonl").read_text("utf-8").splitlines()
    return [
        Ask(json.loads(line)["text"], TOKENS, 0.0, i) for i, line in enumerate(lines[:REQUESTS])
    ]


def test_protocols_agree_with_each_other_and_with_the_metrics(servers: tuple[Ports, str]) -> None:
    ports, openai = servers
    urls = {
        "triton-grpc": f"127.0.0.1:{ports.grpc}",
        "triton-http": f"127.0.0.1:{ports.http}",
        "openai": openai,
    }
    loads = [Load(users=1), Load(users=3), Load(rate=50.0)]
    levels: dict[str, list[Level]] = {protocol: [] for protocol in urls}
    for protocol, url in urls.items():
        seen: list[tuple[int, int]] = []
        before = committed(ports)

        arguments = (protocol, url, None, loads, asks(), REQUESTS, GOAL)
        tell = partial(_tell, seen)
        asyncio.run(measure_server(*arguments, tell, levels[protocol]))
        assert seen[-1] == (3 * REQUESTS, 3 * REQUESTS)
        tokens, rounds = (b - a for a, b in zip(before, committed(ports), strict=True))
        # the warm-up is the first two prompts again, and a first token comes from no round
        warm_up = levels["triton-grpc"][0]
        assert tokens == (3 * REQUESTS + 2) * (TOKENS - 1)
        assert sum(level.rounds or 0 for level in levels[protocol]) < rounds
        assert rounds - sum(level.rounds or 0 for level in levels[protocol]) < (warm_up.rounds or 0)
    for found in levels.values():
        for level, load in zip(found, loads, strict=True):
            assert (level.users, level.rate) == (load.users, load.rate)
            assert (level.requests, level.errors) == (REQUESTS, 0)
            assert level.tokens == REQUESTS * TOKENS
            for name in ("prompt_tokens", "rounds", "tau"):
                assert getattr(level, name) == getattr(levels["triton-grpc"][0], name)
            for times in (level.first_token, level.inter_token, level.whole):
                assert times == sorted(times)
            assert 0 < level.first_token[0] < level.whole[0] <= level.seconds


def _tell(seen: list[tuple[int, int]], done: int, total: int) -> None:
    seen.append((done, total))


def test_a_run_by_command(
    servers: tuple[Ports, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [
        *("bench", "serve", f"127.0.0.1:{servers[0].grpc}", "--users", "2", "--rates", "20"),
        *("--requests", "4", "--max-tokens", "8", "--output", str(tmp_path / "run.json")),
        *("--report", str(tmp_path / "report")),
    ]
    monkeypatch.setattr("sys.argv", ["dflash-trt", *arguments])
    assert main() == 0
    markdown = (tmp_path / "report" / "report.md").read_text()
    assert capsys.readouterr().out == markdown + "\n"
    assert "| 2 users | 4 | 0 | 32 |" in markdown
    assert "| 20 requests/s | 4 | 0 | 32 |" in markdown
    assert (tmp_path / "report" / "report.html").read_text().count("<svg") == 2
    assert json.loads((tmp_path / "run.json").read_text())["levels"][0]["tokens"] == 32


def test_messages_are_asked_as_a_chat(servers: tuple[Ports, str], tmp_path: Path) -> None:
    """By every protocol: the template's tokens, without thinking, and one text."""
    ports, openai = servers
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": as_chat("Sort it.")}) + "\n")
    (chat,) = load_asked(str(tmp_path / "chats.jsonl"), 4)
    encode = load_encoding(PYCODE / "target")
    found = [
        answer(protocol, url, Ask(chat, TOKENS, 0.0, 0))
        for protocol, url in (
            ("triton-grpc", f"127.0.0.1:{ports.grpc}"),
            ("triton-http", f"127.0.0.1:{ports.http}"),
            ("openai", openai),
        )
    ]
    for each in found:
        assert each.error is None
        assert each.prompt_tokens == len(encode("# Sort it.\ndef "))
        assert each.tokens == TOKENS
        assert each.rounds == found[0].rounds
        assert len(each.came) > 1


def answer(protocol: str, url: str, ask: Ask) -> Answer:
    async def asked() -> Answer:
        async with open_client(protocol, url, None, 1) as client:
            return await client.ask(ask)

    return asyncio.run(asked())


def test_a_peer_of_the_table_that_is_a_server(servers: tuple[Ports, str], built: Path) -> None:
    """As scripts/bench_table.py measures vLLM's and llama.cpp's; here it is our own front."""
    lines = (PYCODE / "prompts.jsonl").read_text("utf-8").splitlines()[:3]
    prompts = [json.loads(line)["ids"] for line in lines]
    own = check(built / "engines", prompts, TOKENS, 7, lambda done: None)
    expected = [*own.outputs[:2], own.outputs[0]]
    work = peers.Work(PYCODE, prompts, TOKENS, 2, 4, expected)
    peer = peers.asked_server("ours", servers[1].removesuffix("/v1"), work)
    for streams in (1, 4):
        sample, same = peer.run(streams)
        assert (sample.tokens, sample.rounds) == (3 * TOKENS, round(3 * (TOKENS - 1) / own.tau))
        assert same == 2


def test_what_cannot_be_asked_is_said(servers: tuple[Ports, str]) -> None:
    nobody = f"127.0.0.1:{free_ports().http}"
    for protocol in ("triton-grpc", "triton-http", "openai"):
        with pytest.raises(BenchError, match=nobody if protocol != "openai" else "/v1/models"):
            run(protocol, nobody)
    with pytest.raises(BenchError, match="HTTP 404"):
        run("openai", servers[1], model="another")
    with pytest.raises(RequestError, match="Known: triton-grpc"):
        run("smoke", nobody)


def run(protocol: str, url: str, model: str | None = None) -> None:
    loads = [Load(users=1)]
    asyncio.run(measure_server(protocol, url, model, loads, asks(), 1, GOAL, lambda *_: None, []))


def test_times_errors_and_goodput() -> None:
    """Four answers of 5 tokens: two good, one late in between, one that failed."""
    answers = [
        Answer(10.0, [10.1, 10.2, 10.3], 7, 5, 2),
        Answer(10.0, [10.4, 10.6], 7, 5, 3),
        Answer(10.0, [10.1, 10.9], 7, 5, 2),
        Answer(10.0, [], error="HTTP 503: busy"),
    ]
    level = summarise(Load(users=4), answers, 10.0, Goal(first_token=0.5, inter_token=0.1))
    assert (level.requests, level.errors, level.first_error) == (4, 1, "HTTP 503: busy")
    assert (level.tokens, level.rounds, level.seconds) == (15, 7, pytest.approx(0.9))
    assert level.tau == pytest.approx((15 - 3) / 7)
    assert level.first_token[0] == pytest.approx(0.1)
    assert level.inter_token[0] == pytest.approx(0.05)
    assert level.whole[0] == pytest.approx(0.6)
    assert level.per_user == pytest.approx(5 / 0.6)
    assert level.good == pytest.approx(2 / 0.9)
    assert level.total == pytest.approx(15 / 0.9)
    page = server_page(ServerRun(url="x", protocol="openai", options={}, levels=[level]))
    assert "| 4 users | 3 | 1 | 15 | 17 | 8 | 1.71 | 2.22 |" in to_markdown(page)
    assert "HTTP 503: busy" in to_html(page)

"""`dflash-trt bench serve` against the real server, by every protocol."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from commands import run
from live import openai_front
from load import metric
from pycode import PYCODE, ROOT, demo_config, prompt_ids, prompt_texts

from dflash_trt.bench import (
    Ask,
    Goal,
    Level,
    Load,
    ServerRun,
    load_asked,
    measure_server,
    server_page,
    to_html,
    to_markdown,
)
from dflash_trt.bench.load import summarise
from dflash_trt.bench.protocols import Answer, open_client
from dflash_trt.build.run import build
from dflash_trt.chat.render import as_chat, load_encoding
from dflash_trt.config import Source, Speculation
from dflash_trt.decoding import check_lossless
from dflash_trt.errors import BenchError, RequestError
from dflash_trt.serving.ports import Ports, free_ports
from dflash_trt.serving.server.run import running_server

sys.path.append(str(ROOT / "scripts"))
import peers

TEMPLATE = "{{ '<think>' if enable_thinking is not false }}# {{ messages[0].content }}\ndef "
TOKENS, REQUESTS = 20, 6
GOAL = Goal(first_token=0.5, inter_token=0.05)
FIXED = Speculation(draft_tokens=7)
Servers = tuple[Ports, str, Path]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """The demo pair with drafts of a fixed length, so that a text always has the same rounds."""
    directory = tmp_path_factory.mktemp("bench") / "built"
    target = Path(shutil.copytree(PYCODE / "target", directory.parent / "target"))
    (target / "chat_template.jinja").write_text(TEMPLATE)
    config = demo_config()
    changed = {
        "speculation": FIXED,
        "target": Source(path=target),
    }
    build(config.model_copy(update=changed), directory, lambda *_: None)
    with running_server(directory) as ports:
        port = free_ports().http
        with openai_front(directory, port, ports):
            yield ports, f"http://127.0.0.1:{port}/v1", directory


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
    return [Ask(text, TOKENS, 0.0, i) for i, text in enumerate(prompt_texts(REQUESTS))]


@pytest.mark.models
def test_protocols_agree_with_each_other_and_with_the_metrics(servers: Servers) -> None:
    ports, openai, _ = servers
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


def test_a_run_by_command(servers: Servers, tmp_path: Path) -> None:
    code, out, _ = run(
        *("bench", "serve", f"127.0.0.1:{servers[0].grpc}", "--users", "2", "--rates", "20"),
        *("--requests", "4", "--max-tokens", "8", "--output", tmp_path / "run.json"),
        *("--report", tmp_path / "report"),
    )
    assert code == 0
    markdown = (tmp_path / "report" / "report.md").read_text()
    assert out == markdown + "\n"
    assert "| 2 users | 4 | 0 | 32 |" in markdown
    assert "| 20 requests/s | 4 | 0 | 32 |" in markdown
    assert (tmp_path / "report" / "report.html").read_text().count("<svg") == 2
    assert json.loads((tmp_path / "run.json").read_text())["levels"][0]["tokens"] == 32


def test_reports_verify_and_metrics_agree(servers: Servers, tmp_path: Path) -> None:
    """Tokens, rounds and tau as they are printed, each by one command, of the same prompts."""
    ports, openai, directory = servers
    file = tmp_path / "prompts.jsonl"
    texts = prompt_texts(2)  # as is the warm-up
    file.write_text("\n".join(json.dumps({"text": text}) for text in texts))

    def command(*arguments: object) -> str:
        code, out, _ = run(*arguments, "--prompts", file, "--max-tokens", TOKENS)
        assert code == 0
        return out

    outputs = tmp_path / "outputs.jsonl"
    verified = json.loads(command("verify", directory, "--outputs", outputs, "--json"))
    rounds = verified["rounds"]
    assert sum(len(json.loads(line)["ids"]) for line in outputs.open()) == 2 * TOKENS
    expected = (str(2 * TOKENS), str(rounds), f"{verified['tau']:.2f}")
    assert verified["tau"] == 2 * (TOKENS - 1) / rounds

    passes = ("--draft-tokens", "7", "--batch", "1,2", "--repeats", "1")
    command("bench", "engine", directory, *passes, "--report", tmp_path / "engine")
    rows = [row for row in printed(tmp_path / "engine", "Speed") if "dflash" in row["setting"]]
    assert [figures(row) for row in rows] == [expected] * 2
    assert {row["same texts"] for row in rows} == {"2 of 2"}

    for protocol, url in (("triton-grpc", f"127.0.0.1:{ports.grpc}"), ("openai", openai)):
        before, report = committed(ports), tmp_path / protocol
        options = ("--protocol", protocol, "--users", "1,2", "--requests", "2")
        command("bench", "serve", url, *options, "--report", report)
        rows = printed(report, "Throughput")
        assert [figures(row) for row in rows] == [expected] * 2
        counted = [b - a for a, b in zip(before, committed(ports), strict=True)]
        assert counted == [3 * 2 * (TOKENS - 1), 3 * rounds]  # two loads, and the warm-up


def figures(row: dict[str, str]) -> tuple[str, str, str]:
    return row["tokens"], row["rounds"], row["tau"]


def printed(folder: Path, title: str) -> list[dict[str, str]]:
    """A table's rows by column, which are the same in the HTML and in the Markdown."""
    html = (folder / "report.html").read_text().split(f"<h2>{title}</h2>")[1].split("</table>")[0]
    head, *rows = (re.findall("<t[hd]>(.*?)</t", row) for row in re.findall("<tr>(.*?)</tr>", html))
    text = (folder / "report.md").read_text().split(f"## {title}\n")[1].split("\n## ")[0]
    lines = [line[2:-2] for line in text.splitlines() if line.startswith("|")]
    cells = [line.split(" | ") for line in lines]
    assert [cells[0], *cells[2:]] == [head, *rows]
    return [dict(zip(head, row, strict=True)) for row in rows]


def test_messages_are_asked_as_a_chat(servers: Servers, tmp_path: Path) -> None:
    """By every protocol: the template's tokens, without thinking, and one text."""
    ports, openai, _ = servers
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


def test_turns_of_a_chat_are_sent_back_whole(servers: Servers, tmp_path: Path) -> None:
    """By every protocol: the same prompts, of which later turns find what was said before."""
    ports, openai, _ = servers
    (tmp_path / "system.txt").write_text("".join(f"def f{i}(x): return {i}\n" for i in range(9)))
    asked = [Ask(as_chat(f"Sort list {i}."), 12, 0.0, i) for i in range(6)]
    system, levels = (tmp_path / "system.txt").read_text(), []
    urls = {
        "triton-grpc": f"127.0.0.1:{ports.grpc}",
        "triton-http": f"127.0.0.1:{ports.http}",
        "openai": openai,
    }
    for protocol, url in urls.items():
        found: list[Level] = []
        arguments = (protocol, url, None, [Load(users=2)], asked, 6, GOAL, lambda *_: None, found)
        asyncio.run(measure_server(*arguments, turns=3, system=system))
        levels += found
    for level in levels:
        assert (level.requests, level.errors, level.tokens) == (6, 0, 72)
        assert level.prompt_tokens == levels[0].prompt_tokens
        assert level.cached_tokens is not None
        assert 0.5 * level.prompt_tokens < level.cached_tokens < level.prompt_tokens
        assert len(level.later_first_token) == 3
    (tmp_path / "prompts.jsonl").write_text('{"text": "Sort it."}\n{"text": "Again."}\n')
    chats = ("--turns", "2", "--system", tmp_path / "system.txt", "--max-tokens", "12")
    code, out, _ = run(
        *("bench", "serve", urls["triton-grpc"], "--users", "1", "--requests", "4", *chats),
        *("--prompts", tmp_path / "prompts.jsonl"),
    )
    assert code == 0
    assert "turns 2, system" in out.replace(f"{tmp_path}/", "")


def answer(protocol: str, url: str, ask: Ask) -> Answer:
    async def asked() -> Answer:
        async with open_client(protocol, url, None, 1) as asking:
            return await asking(ask)

    return asyncio.run(asked())


def test_a_peer_of_the_table_that_is_a_server(servers: Servers, built: Path) -> None:
    """As scripts/bench_table.py measures vLLM's and llama.cpp's; here it is our own front."""
    prompts = prompt_ids(3)
    own = check_lossless(built / "engines", prompts, TOKENS, FIXED, lambda done: None)
    expected = [*own.outputs[:2], own.outputs[0]]
    work = peers.Work(PYCODE, prompts, TOKENS, 2, 4, expected)
    peer = peers.asked_server("ours", servers[1].removesuffix("/v1"), work)
    for streams in (1, 4):
        sample, same = peer.run(streams)
        assert (sample.tokens, sample.rounds) == (3 * TOKENS, round(3 * (TOKENS - 1) / own.tau))
        assert same == 2


def test_what_cannot_be_asked_is_said(servers: Servers) -> None:
    nobody = f"127.0.0.1:{free_ports().http}"
    for protocol in ("triton-grpc", "triton-http", "openai"):
        with pytest.raises(BenchError, match=nobody if protocol != "openai" else "/v1/models"):
            measure(protocol, nobody)
    with pytest.raises(BenchError, match="HTTP 404"):
        measure("openai", servers[1], model="another")
    with pytest.raises(RequestError, match="Known: triton-grpc"):
        measure("smoke", nobody)


def measure(protocol: str, url: str, model: str | None = None) -> None:
    loads = [Load(users=1)]
    asyncio.run(measure_server(protocol, url, model, loads, asks(), 1, GOAL, lambda *_: None, []))


def test_times_errors_and_goodput() -> None:
    """Four answers of 5 tokens: two good, one late in between, one that failed."""
    answers = [
        Answer(10.0, [10.1, 10.2, 10.3], 7, 5, 2, round_tokens=[3, 1]),
        Answer(10.0, [10.4, 10.6], 7, 5, 3),
        Answer(10.0, [10.1, 10.9], 7, 5, 2, round_tokens=[2, 2]),
        Answer(10.0, [], error="HTTP 503: busy"),
    ]
    chats = [[each] for each in answers]
    level = summarise(Load(users=4), chats, 10.0, Goal(first_token=0.5, inter_token=0.1))
    assert (level.requests, level.errors, level.first_error) == (4, 1, "HTTP 503: busy")
    assert (level.tokens, level.rounds, level.seconds) == (15, 7, pytest.approx(0.9))
    assert level.kept == [0.75, 0.25]
    assert level.tau == pytest.approx((15 - 3) / 7)
    assert level.first_token[0] == pytest.approx(0.1)
    assert level.inter_token[0] == pytest.approx(0.05)
    assert level.whole[0] == pytest.approx(0.6)
    assert level.per_user == pytest.approx(5 / 0.6)
    assert level.good == pytest.approx(2 / 0.9)
    assert level.total == pytest.approx(15 / 0.9)
    page = server_page(ServerRun(url="x", protocol="openai", options={}, levels=[level]))
    assert "| 4 users | 3 | 1 | 15 | 17 | 8 | 20 | 7 | 1.71 | 2.22 |" in to_markdown(page)
    assert "HTTP 503: busy" in to_html(page)

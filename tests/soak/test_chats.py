"""SmolLM2 as people use it: 32 chats of three turns at once, over Triton and OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from chat_pair import smollm2_build
from live import assert_goes_idle, openai_front

from dflash_trt.prompts import read_lines
from dflash_trt.serving.client import Client
from dflash_trt.serving.ports import Ports, free_ports
from dflash_trt.serving.server.run import running_server

pytestmark = pytest.mark.soak
PROMPTS = Path(__file__).parents[2] / "examples" / "smollm2" / "prompts.jsonl"
CHATS, TOKENS, WAIT = 32, 32, 600.0
TURNS = ("Say that in other words.", "Thank you. Give me an example.")
Messages = list[dict[str, Any]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Ports, int]]:
    built, port = smollm2_build(tmp_path_factory.mktemp("chats")), free_ports().http
    with running_server(built) as triton, openai_front(built, port, triton):
        yield triton, port


def over_triton(server: tuple[Ports, int], messages: Messages, drafting: bool = True) -> str:
    with Client(f"127.0.0.1:{server[0].grpc}") as client:
        answer = client.generate(messages, max_tokens=TOKENS, drafting=drafting, timeout=WAIT)
    return answer.text


def over_openai(server: tuple[Ports, int], messages: Messages) -> str:
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{server[1]}/v1", api_key="none", timeout=WAIT, max_retries=0
    ) as api:
        stream = api.chat.completions.create(
            model="smollm2", messages=messages, max_tokens=TOKENS, temperature=0, stream=True
        )
        return "".join(part.choices[0].delta.content or "" for part in stream if part.choices)


def test_chats_at_once(server: tuple[Ports, int]) -> None:
    """Every answer of every turn is what plain decoding says to the same chat alone."""
    questions = read_lines(PROMPTS, lambda entry: entry["messages"])[:CHATS]

    def talk(i: int) -> Messages:
        ask = over_triton if i % 2 else over_openai
        messages: Messages = list(questions[i])
        for said in (*TURNS, None):
            messages.append({"role": "assistant", "content": ask(server, messages)})
            if said:
                messages.append({"role": "user", "content": said})
        return messages

    with ThreadPoolExecutor(CHATS) as pool:
        chats = list(pool.map(talk, range(CHATS)))
    assert_goes_idle(server[0])
    for messages in chats:
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                alone = over_triton(server, messages[:i], drafting=False)
                assert message["content"] == alone

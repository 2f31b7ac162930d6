"""What the test suites of other servers ask of any OpenAI server, asked of ours with SmolLM2.

vLLM's and SGLang's tests of their OpenAI servers and llama.cpp's server tests were read, nothing is
copied. A row is a request and what has to hold of its answer; what we do otherwise on purpose is
in docs/serving.md ("Differences from other servers").
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import jsonschema
import pytest

from tests.support.chat_pair import smollm2_build
from tests.support.servers import serve_ports, serving

pytestmark = pytest.mark.soak

Json = dict[str, Any]
Check = Callable[[Any], object]
WAIT = 120.0
CHAT = "chat/completions"
HI: list[Json] = [{"role": "user", "content": "Say hello."}]
COUNT: list[Json] = [{"role": "user", "content": "Count from one to twenty in words."}]
SCHEMA: Json = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL: Json = {"type": "function", "function": {"name": "add_person", "parameters": SCHEMA}}
NAMED: Json = {"type": "function", "function": {"name": "add_person"}}
FORMAT: Json = {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA}}
PARTS = [
    {"type": "text", "text": "Say", "cache_control": {"type": "ephemeral"}},
    {"type": "text", "text": "hello."},
]


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    ports = serve_ports()
    built = smollm2_build(tmp_path_factory.mktemp("openai_clients"))
    url = f"http://127.0.0.1:{ports.http}/v1"
    with serving(built, ports), httpx.Client(base_url=url, timeout=WAIT) as client:
        yield client


def post(api: httpx.Client, path: str, fields: Json) -> httpx.Response:
    base: Json = {"model": api.get("models").json()["data"][0]["id"], "temperature": 0}
    return api.post(path, json={**base, **fields})


def events(answer: httpx.Response) -> list[Json]:
    assert answer.headers["content-type"].startswith("text/event-stream")
    *lines, end = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert end == "[DONE]"
    return [json.loads(line) for line in lines]


def content(answer: Any) -> str:
    return str(answer["choices"][0]["message"]["content"])


def valid(value: Any) -> bool:
    jsonschema.validate(value, SCHEMA)
    return True


def logprobs_of_chat(answer: Any) -> bool:
    found = answer["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(each["bytes"]) for each in found).decode().startswith(content(answer))
    return len(found) == 5 and all(len(each["top_logprobs"]) == 3 for each in found)


def logprobs_of_text(answer: Any) -> bool:
    [choice] = answer["choices"]
    found = choice["logprobs"]
    text = "".join(found["tokens"])
    assert text == choice["text"]
    for token, at, top in zip(
        found["tokens"], found["text_offset"], found["top_logprobs"], strict=True
    ):
        assert text[at : at + len(token)] == token
        assert token in top
    return True


ANSWERED: list[tuple[str, Json, Check]] = [
    (CHAT, {"messages": [{"role": "developer", "content": PARTS}, *HI]}, content),
    (
        CHAT,
        {"messages": COUNT, "max_tokens": 5, "logprobs": True, "top_logprobs": 3},
        logprobs_of_chat,
    ),
    (
        CHAT,
        {"messages": COUNT, "stop": ["three", "Three"], "max_tokens": 60},
        lambda a: (
            "hree" not in content(a) and a["choices"][0]["stop_reason"] in ("three", "Three", None)
        ),
    ),
    (
        CHAT,
        {"messages": HI, "response_format": {"type": "json_object"}, "max_tokens": 200},
        lambda a: isinstance(json.loads(content(a)), dict),
    ),
    (
        CHAT,
        {
            "messages": [
                {"role": "user", "content": "x"},
                {"role": "assistant", "content": "One,"},
            ],
            "continue_final_message": True,
            "add_generation_prompt": False,
            "max_tokens": 8,
        },
        content,
    ),
    (
        "completions",
        {"prompt": "\U0001f642", "max_tokens": 9, "temperature": 1, "seed": 3, "logprobs": 2},
        logprobs_of_text,
    ),
    (
        "completions",
        {"prompt": "One", "max_tokens": 3, "logprobs": 0},
        lambda a: all(a["choices"][0]["logprobs"]["top_logprobs"]),
    ),
    ("responses", {"input": HI, "instructions": "Be brief."}, lambda a: a["status"]),
    (
        "responses",
        {"input": COUNT, "max_output_tokens": 5},
        lambda a: a["incomplete_details"]["reason"] == "max_output_tokens",
    ),
    (
        "responses",
        {"input": HI, "text": {"format": {**FORMAT["json_schema"], "type": "json_schema"}}},
        lambda a: valid(json.loads(a["output"][0]["content"][0]["text"])),
    ),
    (
        "responses",
        {
            "input": HI,
            "tools": [{"type": "function", **TOOL["function"]}],
            "tool_choice": {"type": "function", "name": "add_person"},
        },
        lambda a: valid(json.loads(a["output"][0]["arguments"])),
    ),
]


@pytest.mark.parametrize(("path", "fields", "holds"), ANSWERED, ids=str)
def test_what_others_answer(api: httpx.Client, path: str, fields: Json, holds: Check) -> None:
    answer = post(api, path, fields)
    assert answer.status_code == 200, answer.text
    assert holds(answer.json()), answer.text


STREAMED: list[Json] = [
    {"messages": HI},
    {"messages": COUNT, "max_tokens": 12},
    {"messages": COUNT, "max_tokens": 12, "logprobs": True},
    {"messages": HI, "response_format": FORMAT},
    {"messages": HI, "tools": [TOOL], "tool_choice": "required"},
    {"messages": HI, "tools": [TOOL], "tool_choice": NAMED, "max_tokens": 6},
]


@pytest.mark.parametrize("fields", STREAMED, ids=str)
def test_a_stream_adds_up_to_the_whole(api: httpx.Client, fields: Json) -> None:
    whole = post(api, CHAT, fields).json()["choices"][0]
    asked = {**fields, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events(post(api, CHAT, asked))
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] > 0
    assert {chunk["usage"] for chunk in chunks} == {None}
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant"}
    assert choices[-1]["delta"] == {}
    reasons = [choice["finish_reason"] for choice in choices]
    assert reasons == [None] * (len(choices) - 1) + [whole["finish_reason"]]
    text, calls = "", dict[int, list[str]]()
    for choice in choices[1:-1]:
        delta = choice["delta"]
        assert len(delta) <= 1
        text += delta.get("content", "")
        for call in delta.get("tool_calls", []):
            found = calls.setdefault(call["index"], ["", ""])
            found[0] += call["function"].get("name", "")
            found[1] += call["function"]["arguments"]
    told = [call["function"] for call in whole["message"].get("tool_calls", [])]
    assert text == (whole["message"]["content"] or "")
    assert [*calls.values()] == [[each["name"], each["arguments"]] for each in told]
    if fields.get("logprobs"):
        found = [each for c in choices if c["logprobs"] for each in c["logprobs"]["content"]]
        for one, other in zip(found, whole["logprobs"]["content"], strict=True):
            assert one == {**other, "logprob": pytest.approx(other["logprob"], abs=1e-3)}

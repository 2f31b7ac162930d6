"""Who wrote each token and what rounds proposed: as the server says it, over the real Triton."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from dflash_trt.serving.client import Client
from dflash_trt.serving.ports import Ports

WAIT = 60.0
PROMPT = "def main():"
CHAT = [{"role": "user", "content": "class Stack:\n    def __init__(self, items=None):\n"}]
ASKED = {"include_usage": True, "include_drafting": True}
SCHEMA = {
    "type": "object",
    "properties": {"identifier_of_the_function": {"type": "integer", "maximum": 99}},
    "required": ["identifier_of_the_function"],
    "additionalProperties": False,
}
Json = dict[str, Any]


@pytest.fixture(scope="module")
def front(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{url}/v1", timeout=WAIT) as client:
        yield client


def stream(front: httpx.Client, path: str = "completions", **fields: Any) -> list[Json]:
    """Return the chunks of an answer with `include_drafting`, unless `stream_options` differ."""
    prompt: Json = {"messages": CHAT} if path == "chat/completions" else {"prompt": PROMPT}
    body = {"model": "pycode", "max_tokens": 60, "temperature": 0, **prompt, "stream": True}
    answer = front.post(f"/{path}", json={**body, "stream_options": ASKED, **fields})
    assert answer.status_code == 200, answer.text
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def choices(chunks: list[Json], index: int = 0) -> list[Json]:
    found = [each for chunk in chunks for each in chunk["choices"]]
    return [each for each in found if each["index"] == index]


def rounds(chunks: list[Json], index: int = 0) -> list[Json]:
    return [each for choice in choices(chunks, index) for each in choice["drafting"]["rounds"]]


def tokens(told: list[Json]) -> list[Json]:
    return [token for each in told for token in each["tokens"]]


def content(chunks: list[Json], index: int = 0) -> str:
    return "".join(
        each["text"] if "text" in each else each["delta"].get("content", "")
        for each in choices(chunks, index)
    )


def check(told: list[Json]) -> Json:
    """Check that rounds fit together; return their sums, as `usage` has them."""
    assert [each["round"] for each in told] == list(range(len(told)))
    assert (len(told[0]["tokens"]), told[0]["proposal"]) == (1, [])
    assert told[0]["tokens"][0]["source"] == "target"
    for each in told[1:]:
        proposal, written = each["proposal"], each["tokens"]
        kept = [at for at, draft in enumerate(proposal) if draft["accepted"]]
        assert kept == [*range(len(kept))]
        # the drafts that were kept, then the target's own
        assert [x["source"] for x in written[: len(kept)]] == [
            proposal[at]["source"] for at in kept
        ]
        assert [x["source"] for x in written[len(kept) :]] in ([], ["target"])
        for at, draft in enumerate(proposal):
            if at <= len(kept):
                assert 0 <= draft["probability"] <= 1
            elif draft["probability"] is not None:  # the text ended before this one
                assert each is told[-1]
    proposed = [draft for each in told for draft in each["proposal"]]
    return {
        "completion_tokens": len(tokens(told)),
        "rounds": len(told) - 1,
        "drafted": len(proposed),
        "accepted": sum(draft["accepted"] for draft in proposed),
    }


def counts(usage: Json) -> Json:
    return {name: usage[name] for name in ("completion_tokens", "rounds", "drafted", "accepted")}


def test_the_counts_are_those_of_usage(front: httpx.Client) -> None:
    for path in ("completions", "chat/completions"):
        for temperature in (0, 0.8):
            chunks = stream(front, path, temperature=temperature, seed=3)
            told = rounds(chunks)
            assert check(told) == counts(chunks[-1]["usage"])
            assert "".join(token["text"] for token in tokens(told)) == content(chunks)
            assert {token["source"] for token in tokens(told)} <= {"drafter", "lookup", "target"}


def test_the_same_without_details_and_without_drafts(front: httpx.Client) -> None:
    with_details = stream(front)
    without = stream(front, stream_options={"include_usage": True})
    plain = stream(front, drafting=False)
    assert content(with_details) == content(without) == content(plain)
    assert not [each for each in choices(without) if "drafting" in each]
    told = rounds(plain)
    assert check(told)["drafted"] == 0
    assert {token["source"] for token in tokens(told)} == {"target"}
    assert [len(each["tokens"]) for each in told] == [1] * 60


def test_with_logprobs(front: httpx.Client) -> None:
    chunks = stream(front, "chat/completions", logprobs=True, top_logprobs=2)
    told = rounds(chunks)
    assert check(told) == counts(chunks[-1]["usage"])
    entries = [x for each in choices(chunks) for x in (each["logprobs"] or {}).get("content", [])]
    probabilities = [
        draft["probability"] for each in told for draft in each["proposal"] if draft["accepted"]
    ]
    drafted = [
        entry
        for entry, token in zip(entries, tokens(told), strict=True)
        if token["source"] != "target"
    ]
    assert probabilities == pytest.approx([np.exp(x["logprob"]) for x in drafted], abs=1e-3)
    assert all(len(x["top_logprobs"]) == 2 for x in entries)


def test_text_that_stop_words_hold_back(front: httpx.Client) -> None:
    whole = content(stream(front))
    stop = whole[40:44]
    chunks = stream(front, stop=[stop, whole[20:22] + "never"])
    told = rounds(chunks)
    assert check(told) == counts(chunks[-1]["usage"])
    text = "".join(token["text"] for token in tokens(told))
    assert content(chunks) == whole[: whole.index(stop)]
    assert text.startswith(content(chunks) + stop)  # the stop word was written, and is told of


def test_what_a_grammar_forces(front: httpx.Client) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    chunks = stream(front, "chat/completions", response_format=schema)
    told = rounds(chunks)
    assert check(told) == counts(chunks[-1]["usage"])
    assert sum(token["source"] == "grammar" for token in tokens(told)) > 5
    assert set(json.loads(content(chunks))) == {"identifier_of_the_function"}


def test_calls_are_told_as_they_were_written(front: httpx.Client) -> None:
    tool = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}
    arguments = '{"identifier_of_the_function": 3}'
    wanted = f'<tool_call>{{"name": "look_up", "arguments": {arguments}}}</tool_call>'
    chunks = stream(front, "chat/completions", tools=[tool], guided_choice=[wanted], max_tokens=90)
    told = rounds(chunks)
    assert check(told) == counts(chunks[-1]["usage"])
    assert "".join(token["text"] for token in tokens(told)) == wanted
    assert content(chunks) == ""
    assert [each for each in choices(chunks) if each["delta"].get("tool_calls")]


def test_characters_of_several_tokens(front: httpx.Client) -> None:
    wanted = "žluťoučký 🐎 日本"
    chunks = stream(front, guided_choice=[wanted])
    texts = [token["text"] for token in tokens(rounds(chunks))]
    assert "".join(texts) == content(chunks) == wanted
    assert "" in texts  # a token that is no character yet


def test_triton_clients_have_the_same(triton: Ports, front: httpx.Client) -> None:
    expected = content(stream(front))
    with Client(f"127.0.0.1:{triton.grpc}") as client:
        chunks = list(client.stream(PROMPT, max_tokens=60, include_drafting=True))
        told = [each for chunk in chunks for each in chunk.drafting]
        assert "".join(token["text"] for token in tokens(told)) == expected
        assert check(told) == counts(vars(chunks[-1]))
        n = client.generate(PROMPT, max_tokens=20, n=2, temperature=1.0, include_drafting=True)
        for choice in n.choices:
            found = check(choice.drafting)
            assert found["drafted"] == choice.drafted
            assert "".join(x["text"] for x in tokens(choice.drafting)) == choice.text
        short = client.generate(PROMPT, max_tokens=20).choices[0]
        assert short.drafting == []
    infer = f"http://127.0.0.1:{triton.http}/v2/models/dflash_infer/infer"
    fields = {"text_input": PROMPT, "max_tokens": 20, "include_drafting": True}
    kinds = {str: "BYTES", int: "INT32", bool: "BOOL"}
    inputs = [
        {"name": name, "shape": [1], "datatype": kinds[type(value)], "data": [value]}
        for name, value in fields.items()
    ]
    for asked in (inputs, inputs[:2]):
        answer = httpx.post(infer, json={"inputs": asked}, timeout=WAIT).json()
        names = {each["name"]: each["data"] for each in answer["outputs"]}
        assert ("drafting_rounds" in names) == (asked is inputs)
        assert (names["text_output"], names["token_ids"]) == ([short.text], short.token_ids)
        if asked is inputs:
            assert check([json.loads(each) for each in names["drafting_rounds"]])["rounds"] > 0

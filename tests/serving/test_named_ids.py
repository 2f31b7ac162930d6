"""Chats of six turns with calls, through OpenAI's client, in the forms of Kimi and MiniMax."""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import jsonschema
import openai
import pytest

from dflash_trt.builder.pipeline import build
from dflash_trt.chat import ChatModel, load_chat_template
from dflash_trt.checkpoints import load_tokenizer
from tests.support.builds import config_of, quiet
from tests.support.pairs import make_pair
from tests.support.servers import serve_ports, serving
from tests.support.tool_templates import WRITING
from tests.support.traffic.campaign import teach_marks
from tests.support.traffic.requests import NAMED, dialect_of

TURNS = 6
LENGTH = 4096
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Rom"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}}
    for name in ("get_weather", "get-time.now")
]
SIGNS = [sign for sign in WRITING if sign == NAMED or "minimax" in sign]
Json = dict[str, Any]


class Served(NamedTuple):
    sign: str
    client: openai.OpenAI
    model: ChatModel
    end_of_thought: int | None  # its token


@pytest.fixture(scope="module", params=SIGNS, ids=["minimax", "kimi"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("chats")
    pair = make_pair(directory, vocab=300, longest=LENGTH)
    teach_marks(pair, dialect_of(request.param))
    sizes = {"slots": 2, "max_seq_len": LENGTH, "mode": "in_process"}
    build(config_of(directory, engine={"threads": 1}, serving=sizes), directory / "built", quiet)
    tokenizer = directory / "built" / "tokenizer"
    loaded = load_tokenizer(tokenizer)
    model = ChatModel(loaded, load_chat_template(tokenizer))
    with serving(directory / "built", ports := serve_ports()):
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{ports.http}/v1", api_key="-")
        yield Served(request.param, client, model, loaded.token_to_id("</think>"))


def ask(served: Served, messages: list[Any], seed: int) -> Json:
    """Return the answer's message; it is the same whole and streamed.

    The pair was not taught to chat: its thought ends because its end is made likely.
    """
    client = served.client
    options: Json = {
        "model": client.models.list().data[0].id,
        "messages": messages,
        "tools": TOOLS,
        "tool_choice": "required",
        "parallel_tool_calls": seed % 2 == 0,
        "seed": seed,
        "logit_bias": {str(served.end_of_thought): 100},
        "max_tokens": 400,
    }
    whole = client.chat.completions.create(**options).choices[0]
    assert whole.finish_reason == "tool_calls"
    calls: list[Json] = []
    for chunk in client.chat.completions.create(**options, stream=True):
        for delta in chunk.choices[0].delta.tool_calls or [] if chunk.choices else []:
            if delta.index == len(calls):
                calls.append({"id": delta.id, "name": delta.function.name, "arguments": ""})
            calls[delta.index]["arguments"] += delta.function.arguments or ""
    shown = [
        {"id": call.id, "name": call.function.name, "arguments": call.function.arguments}
        for call in whole.message.tool_calls or []
    ]
    assert len(calls) == len(shown) > 0
    for one, other in zip(calls, shown, strict=True):
        assert {**one, "id": ""} == {**other, "id": ""}
    message: Json = whole.message.model_dump(exclude_none=True)
    return message


def test_chats_of_six_turns(served: Served) -> None:
    messages: list[Any] = [{"role": "user", "content": "the weather?"}]
    ids: list[str] = []
    for turn in range(TURNS):
        message = ask(served, messages, turn)
        messages.append(message)
        for call in message["tool_calls"]:
            function = call["function"]
            jsonschema.validate(json.loads(function["arguments"]), PARAMETERS)
            if served.sign == NAMED:
                assert call["id"] == f"functions.{function['name']}:{len(ids)}"
            ids.append(call["id"])
            sent = {"role": "tool", "tool_call_id": call["id"], "content": f"result {len(ids)}"}
            messages.append(sent)
        if turn % 2:
            messages.append({"role": "user", "content": "and then?"})
    assert len(set(ids)) == len(ids)
    text = served.model.prompt(
        messages, TOOLS, template_values={"add_generation_prompt": True}
    ).text
    for number, call_id in enumerate(ids):
        assert f"result {number + 1}" in text
        if served.sign == NAMED:
            assert f"<|tool_call_begin|>{call_id}<|tool_call_argument_begin|>" in text
            assert f"## Return of {call_id}\nresult {number + 1}<" in text
    assert ("namespace functions {" in text) == (served.sign == NAMED)


def test_ids_of_another_server_are_given_its_form(served: Served) -> None:
    function = {"name": "get_weather", "arguments": '{"city": "Bern"}'}
    called = [{"id": f"call_{n}", "type": "function", "function": function} for n in range(2)]
    messages: list[Any] = [
        {"role": "user", "content": "the weather?"},
        {"role": "assistant", "content": None, "tool_calls": called},
        *[{"role": "tool", "tool_call_id": f"call_{n}", "content": "warm"} for n in range(2)],
    ]
    [call, *_] = ask(served, messages, 1)["tool_calls"]
    assert served.sign != NAMED or call["id"] == f"functions.{call['function']['name']}:2"

"""`/v1/responses` as a chat, and its events as OpenAI's own types read them; no server."""

import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent, response_create_params
from pydantic import TypeAdapter, ValidationError
from test_answers import CALL, CALLS, chat_writer, chunk, summary

from dflash_trt.errors import RequestError
from dflash_trt.serving.app.failures import Failure
from dflash_trt.serving.app.fields import UNSUPPORTED
from dflash_trt.serving.app.responses import NOT_HERE, STORED, ResponseFields, ResponseWriter

USER = {"role": "user", "content": "hi"}
PARTS = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
TOOL = {"type": "function", **FUNCTION}


def called(number: int) -> dict[str, Any]:
    return {"type": "function_call", "call_id": f"c{number}", "name": "f", "arguments": "{}"}


def call(number: int) -> dict[str, Any]:
    return {"id": f"c{number}", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def output(number: int, value: Any = "3") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": f"c{number}", "output": value}


def result(number: int, value: Any = "3") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"c{number}", "content": value}


THOUGHT = {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "Hm."}]}
SAID = {"type": "message", "id": "m", "status": "completed", "role": "assistant", "content": "Yes"}


def fields(**values: Any) -> ResponseFields:
    return ResponseFields.model_validate({"model": "m", "input": "hi", **values})


def test_an_input_is_messages() -> None:
    """Items of an answer, sent back, become the same assistant message."""
    table: list[tuple[Any, list[dict[str, Any]]]] = [
        ("hi", [USER]),
        ([USER], [USER]),
        ([{**USER, "type": "message", "content": PARTS}], [{**USER, "content": PARTS}]),
        (
            [USER, THOUGHT, SAID, called(1), called(2), output(1), output(2, PARTS), USER],
            [
                USER,
                {
                    "role": "assistant",
                    "reasoning_content": "Hm.",
                    "content": "Yes",
                    "tool_calls": [call(1), call(2)],
                },
                result(1),
                result(2, PARTS),
                USER,
            ],
        ),
        (
            [SAID, THOUGHT, called(1), output(1), called(2), output(2)],
            [
                {"role": "assistant", "content": "Yes"},
                {"role": "assistant", "reasoning_content": "Hm.", "tool_calls": [call(1)]},
                result(1),
                {"role": "assistant", "tool_calls": [call(2)]},
                result(2),
            ],
        ),
        (
            [{**THOUGHT, "content": [{"type": "reasoning_text", "text": "Long."}]}, SAID, SAID],
            [
                {"role": "assistant", "reasoning_content": "Long.", "content": "Yes"},
                {"role": "assistant", "content": "Yes"},
            ],
        ),
    ]
    for value, expected in table:
        [messages], _ = fields(input=value).prompts_and_options()
        assert messages == expected
    for thought in (5, "Hm.", [5], [{"text": 5}], None):
        item = {"type": "reasoning", "summary": thought}
        [[made]], _ = fields(input=[item]).prompts_and_options()
        assert made["reasoning_content"] == ("Hm." if thought == "Hm." else "")
    [messages], _ = fields(instructions="Be brief.").prompts_and_options()
    assert messages == [{"role": "system", "content": "Be brief."}, USER]


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ({"max_output_tokens": 5}, {"max_tokens": 5}),
        ({"tools": [TOOL]}, {"tools": [{"type": "function", "function": FUNCTION}]}),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}},
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        ),
        (
            {"reasoning": {"effort": "low", "summary": "auto"}},
            {"chat_template_kwargs": {"reasoning_effort": "low"}},
        ),
        ({"reasoning": {"summary": "auto"}}, {"chat_template_kwargs": None}),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {}}}},
            {"response_format": {"type": "json_schema", "name": "n", "schema": {}}},
        ),
        ({"text": {"format": {"type": "text"}, "verbosity": "low"}}, {"response_format": None}),
        ({"include": ["message.output_text.logprobs"]}, {"logprobs": 0}),
        ({"top_logprobs": 2}, {"logprobs": 2}),
        ({"temperature": 0.5, "top_p": 0.5}, {"temperature": 0.5, "top_p": 0.5}),
        ({"store": False, "metadata": {"a": "b"}, "user": "u", "max_tool_calls": 2}, {}),
        ({"tool_choice": "auto", "truncation": "disabled", "background": False}, {}),
        ({"include": ["reasoning.encrypted_content"], "previous_response_id": None}, {}),
        ({"stream": True, "stream_options": {"include_obfuscation": False}}, {}),
    ],
    ids=str,
)
def test_its_fields_are_those_of_a_chat(sent: dict[str, Any], expected: dict[str, Any]) -> None:
    _, options = fields(**sent).prompts_and_options()
    for name, value in expected.items():
        assert options[name] == value


@pytest.mark.parametrize(
    ("sent", "param", "words"),
    [
        ({"previous_response_id": "x"}, "previous_response_id", "nothing is stored"),
        ({"conversation": "x"}, "conversation", "nothing is stored"),
        ({"background": True}, "background", "not supported"),
        ({"truncation": "auto"}, "truncation", "not supported"),
        ({"prompt": {"id": "x"}}, "prompt", "not supported"),
        ({"messages": [USER]}, "messages", "Unknown"),
        ({"n": 2}, "n", "Unknown"),
        ({"tools": [{"type": "web_search"}]}, "tools", "'web_search'"),
        ({"input": []}, "input", "a text or a list"),
        ({"input": 5}, "input", "a text or a list"),
        ({"input": ["x"]}, "input", "'input[0]'"),
        ({"input": [USER, {"type": "item_reference", "id": "x"}]}, "input", "'input[1]' is of"),
        ({"input": [{"content": "x"}]}, "input", "has no role"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input", "encrypted"),
        ({"input": [{"type": ["x"]}]}, "input", "is of type"),
        ({"input": [{"role": 5}]}, "input", "has no role"),
        ({"include": 5}, "include", "list"),
        ({"tools": [5]}, "tools", "only functions"),
        ({"reasoning": {"efort": "low"}}, "reasoning", "'reasoning.efort'"),
        ({"text": {"formats": {}}}, "text", "'text.formats'"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options", "stream_options.x"),
    ],
    ids=str,
)
def test_what_it_cannot_do_is_refused(sent: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(Failure) as caught:
        fields(**sent)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert words in caught.value.message


def test_faults_have_its_own_names() -> None:
    for sent, place in (
        ({"max_output_tokens": "x"}, ("max_output_tokens",)),
        ({"reasoning": {"effort": "ultra"}}, ("reasoning", "effort")),
        ({"text": {"format": 5}}, ("text", "format")),
        ({"nonsense": 1}, ("nonsense",)),
    ):
        with pytest.raises(ValidationError) as caught:
            fields(**sent)
        assert caught.value.errors()[0]["loc"] == place
    several = fields(input=[SAID, called(1), output(1), USER], instructions="x")
    for problem, expected in (
        ("messages[0].content is", "instructions.content is"),
        ("messages[3].content[1]: image", "input[3].content[1]: image"),
        ("response_format holds 'x'", "text.format holds"),
        ("max_tokens is -1", "max_output_tokens is -1"),
    ):
        assert expected in several.translate_refusal(RequestError(problem, "Send text")).message


def test_each_field_of_openai_is_known() -> None:
    known = ResponseFields.model_fields.keys() - set(NOT_HERE) | {*UNSUPPORTED["ignored"], *STORED}
    known |= UNSUPPORTED["both"].keys() | UNSUPPORTED["responses"].keys()
    known |= {"input", "instructions", "include", "max_output_tokens", "max_tool_calls"}
    known |= {"reasoning", "text"}
    params = response_create_params.ResponseCreateParamsStreaming.__annotations__.keys()
    not_there = {"access_programs", "image", "background_options"}  # unknown: they are refused
    assert params - known - not_there == set()


ANSWERS: list[tuple[str, str, list[tuple[str, Any]], str]] = [
    ("Hi", "stop", [("message", "Hi")], "completed"),
    ("", "stop", [("message", "")], "completed"),
    ("Hi", "length", [("message", "Hi")], "incomplete"),
    ("<think>Hm.</think>Well.", "stop", [("reasoning", "Hm."), ("message", "Well.")], "completed"),
    (CALLS, "stop", [("function_call", {"a": 1})] * 2, "completed"),
    (
        f"<think>Hm.</think>So. {CALL}",
        "stop",
        [("reasoning", "Hm."), ("message", "So."), ("function_call", {"a": 1})],
        "completed",
    ),
]


@pytest.mark.parametrize(("text", "reason", "items", "status"), ANSWERS)
@pytest.mark.parametrize("size", [1, 5, 100])
def test_an_answer_in_events(
    text: str, reason: str, items: list[tuple[str, Any]], status: str, size: int
) -> None:
    asked = fields(instructions="x", metadata={"a": "b"}, store=True)
    writer, choice = ResponseWriter(asked), chat_writer(stream=True)
    sent = [*writer.begin()]
    pieces = [text[at : at + size] for at in range(0, len(text), size)] or [""]
    for at, piece in enumerate(pieces):
        last = at == len(pieces) - 1
        written = choice.write(chunk(piece, reason if last else ""))
        sent += writer.push(written, summary(reason) if last else None)
    told = [json.loads(each.split(b"data: ")[1]) for each in sent]
    read = TypeAdapter[Any](ResponseStreamEvent)
    events = [read.validate_python(each) for each in told]
    assert [each.split(b"\n")[0].decode() for each in sent] == [f"event: {e.type}" for e in events]
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert events[-1].type == f"response.{status}"
    answer = Response.model_validate(writer.response)
    assert told[-1]["response"] == writer.response
    assert (answer.status, answer.instructions, answer.metadata) == (status, "x", {"a": "b"})
    assert (writer.response["store"], answer.usage is not None) == (False, True)
    found: list[tuple[str, Any]] = []
    for item in answer.output:
        if item.type == "message":
            found.append((item.type, item.content[0].text))  # type: ignore[union-attr]
        elif item.type == "reasoning":
            found.append((item.type, item.summary[0].text))
        elif item.type == "function_call":
            found.append((item.type, json.loads(item.arguments)))
    assert found == items
    assert len({each["id"] for each in writer.response["output"]}) == len(items)
    # what came in pieces is the whole
    for number, item in enumerate(answer.output):
        own = [each for each in told if each.get("output_index") == number]
        deltas = "".join(each["delta"] for each in own if each["type"].endswith(".delta"))
        whole = [each for each in own if each["type"].endswith((".done",))]
        assert deltas == whole[0].get("text", whole[0].get("arguments"))
        assert whole[-1]["item"] == writer.response["output"][number]
        assert own[0]["type"] == "response.output_item.added"
        assert {each.get("item_id", item.id) for each in own} == {item.id}


def test_a_failure_ends_the_stream_with_its_reason() -> None:
    writer = ResponseWriter(fields())
    [*_] = writer.begin()
    [*_] = writer.push(chat_writer(stream=True).write(chunk("a")), None)
    last = json.loads([*writer.fail(Failure(504, "Too late.", "timeout"))][-1].split(b"data: ")[1])
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["message"] == "Too late."
    assert last["response"]["output"][0]["status"] == "incomplete"

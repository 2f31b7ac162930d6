"""`/v1/responses` as a chat, and its events as OpenAI's own types read them; no server."""

import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent, response_create_params
from pydantic import TypeAdapter

from dflash_trt.errors import RequestError
from dflash_trt.serving.http.failures import Failure
from dflash_trt.serving.http.fields import UNSUPPORTED
from dflash_trt.serving.http.logprobs import ContentLogprobs
from dflash_trt.serving.http.responses import (
    Conversation,
    ReadRequest,
    ResponseRequest,
    ResponseStore,
    ResponseWriter,
    read_request,
)
from dflash_trt.serving.http.responses.writer import begun_response
from tests.serving.test_answers import CALL, CALLS, chat_reader, chunk

USER = {"role": "user", "content": "hi"}
PARTS = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
TOOL = {"type": "function", **FUNCTION}
HOSTED = {"type": "web_search"}
EVENTS = TypeAdapter[Any](ResponseStreamEvent)


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


def read(earlier: ResponseStore | None = None, owner: str = "", **values: Any) -> ReadRequest:
    body = {"model": "m", "input": "hi", **values}
    return read_request(body, earlier or ResponseStore(0), owner)


def messages_of(**values: Any) -> list[dict[str, Any]]:
    [messages], _ = read(**values).chat.prompts_and_options()
    return messages  # type: ignore[return-value]


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
        assert messages_of(input=value) == expected
    for thought in (5, "Hm.", [5], [{"text": 5}], None):
        item = {"type": "reasoning", "summary": thought}
        [made] = messages_of(input=[item])
        assert made["reasoning_content"] == ("Hm." if thought == "Hm." else "")
    assert messages_of(instructions="Be brief.") == [
        {"role": "system", "content": "Be brief."},
        USER,
    ]


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
        ({"top_k": 5, "guided_regex": "a"}, {"top_k": 5, "guided_regex": "a"}),
        ({"tool_choice": "auto", "truncation": "disabled", "background": False}, {}),
        ({"truncation": "auto"}, {}),
        ({"include": ["reasoning.encrypted_content"], "previous_response_id": None}, {}),
        ({"stream": True, "stream_options": {"include_obfuscation": False}}, {}),
    ],
    ids=str,
)
def test_its_fields_are_those_of_a_chat(sent: dict[str, Any], expected: dict[str, Any]) -> None:
    _, options = read(**sent).chat.prompts_and_options()
    for name, value in expected.items():
        assert options[name] == value


@pytest.mark.parametrize(
    ("sent", "param", "words"),
    [
        ({"previous_response_id": "x"}, "previous_response_id", "'x' is not found"),
        ({"conversation": "x"}, "conversation", "not kept here"),
        ({"background": True}, "background", "not supported"),
        ({"truncation": "middle"}, "truncation", "auto"),
        ({"prompt": {"id": "x"}}, "prompt", "not supported"),
        ({"messages": [USER]}, "messages", "Unknown"),
        ({"n": 2}, "n", "Unknown"),
        ({"tools": [{"type": "x"}]}, "tools", "'tools[0]' is of type 'x'"),
        ({"tools": [{"type": "function"}]}, "tools", "'tools[0].name'"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools", "'tools[0].name'"),
        ({"tools": [{**TOOL, "parameters": {"type": "x"}}]}, "tools", "'tools[0].parameters'"),
        ({"tools": [TOOL, TOOL]}, "tools", "'tools[1]' has the name of another"),
        ({"tools": [{"type": "custom", "name": "c", "format": 5}]}, "tools", "[0].format'"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools", "'tools[0].tools'"),
        ({"tools": [HOSTED], "tool_choice": "required"}, "tool_choice", "web_search"),
        ({"tools": [TOOL, HOSTED], "tool_choice": HOSTED}, "tool_choice", "web_search"),
        ({"tool_choice": "required"}, "tool_choice", "send 'tools'"),
        ({"tools": [TOOL], "tool_choice": {"type": "any"}}, "tool_choice", '"name": ".."'),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice", "'g'"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "mode"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format", "'text.format.schema'"),
        ({"text": {"format": {"type": "x"}}}, "text.format", "text.format.type"),
        ({"input": [{"type": "function_call", "call_id": "c"}]}, "input", "'input[0].name'"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input", "'input[0].call_id'"),
        ({"input": [{**called(1), "arguments": 5}]}, "input", "'input[0].arguments'"),
        ({"metadata": 5}, "metadata", "'metadata'"),
        ({"metadata": {"a": 5}}, "metadata", "'metadata.a'"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata", "16"),
        ({"metadata": {"a": "b" * 513}}, "metadata", "512"),
        ({"user": 5}, "user", "'user'"),
        ({"max_tool_calls": "a"}, "max_tool_calls", "'max_tool_calls'"),
        ({"include": ["bogus"]}, "include", "'include[0]'"),
        ({"text": {"verbosity": "x"}}, "text", "'text.verbosity'"),
        ({"reasoning": {"summary": "x"}}, "reasoning", "'reasoning.summary'"),
        ({"store": "yes"}, "store", "'store'"),
        ({"instructions": 5}, "instructions", "'instructions'"),
        ({"max_output_tokens": "x"}, "max_output_tokens", "'max_output_tokens'"),
        ({"max_output_tokens": 2**40}, "max_output_tokens", "'max_output_tokens'"),
        ({"reasoning": {"effort": "ultra"}}, "reasoning", "'reasoning.effort'"),
        ({"text": {"format": 5}}, "text", "'text.format'"),
        ({"nonsense": 1}, "nonsense", "Unknown parameter: 'nonsense'"),
        ({"input": []}, "input", "a text or a list"),
        ({"input": 5}, "input", "a text or a list"),
        ({"input": ["x"]}, "input", "'input[0]'"),
        ({"input": [USER, {"type": "item_reference", "id": "x"}]}, "input", "'store' to false"),
        ({"input": [{"content": "x"}]}, "input", "has no role"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input", "encrypted"),
        ({"input": [{"type": ["x"]}]}, "input", "is of type"),
        ({"input": [{"role": 5}]}, "input", "has no role"),
        ({"include": 5}, "include", "list"),
        ({"tools": [5]}, "tools", "'tools[0]' is not an object"),
        ({"reasoning": {"efort": "low"}}, "reasoning", "'reasoning.efort'"),
        ({"text": {"formats": {}}}, "text", "'text.formats'"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options", "stream_options.x"),
    ],
    ids=str,
)
def test_what_it_cannot_do_is_refused(sent: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(Failure) as caught:
        read(**sent)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert words in caught.value.message


def test_faults_have_its_own_names() -> None:
    items = [SAID, called(1), called(2), output(1), output(2), USER]
    several = read(input=items, instructions="x", tools=[HOSTED, TOOL]).chat
    for problem, expected in (
        ("messages[0].content is", "instructions.content is"),
        ("messages[3].content[1]: image", "input[4].content[1]: image"),
        ("messages[4].content is", "input[5].content is"),
        ("messages[1].tool_calls[1] is", "input[2] is"),
        ("tools[0].function.parameters of", "tools[1].parameters of"),
        ("response_format holds 'x'", "text.format holds"),
        ("max_tokens is -1", "max_output_tokens is -1"),
    ):
        assert expected in several.translate_refusal(RequestError(problem, "Send text")).message


def test_a_refusal_advises_what_this_api_has() -> None:
    problem = RequestError("messages[0]: no", 'Send {"type": "text", "text": ".."} or a string.')
    assert '{"type": "input_text"' in read().chat.translate_refusal(problem).message


def test_each_field_of_openai_is_known() -> None:
    known = ResponseRequest.model_fields.keys() | {*UNSUPPORTED["ignored"]}
    known |= UNSUPPORTED["both"].keys() | UNSUPPORTED["responses"].keys() | {"conversation"}
    params = response_create_params.ResponseCreateParamsStreaming.__annotations__.keys()
    not_there = {"access_programs", "image", "background_options"}  # unknown: they are refused
    assert params - known - not_there == set()


CUSTOM = {"type": "custom", "name": "patch", "description": "Changes files."}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}
NAMESPACE = {
    "type": "namespace",
    "name": "files",
    "description": "A server's.",
    "tools": [{**TOOL, "name": "read"}, {"type": "custom", "name": "write"}],
}


def test_tools_of_other_kinds_become_functions() -> None:
    asked = read(tools=[HOSTED, {**CUSTOM, "format": GRAMMAR}, NAMESPACE, TOOL])
    functions = {each["function"]["name"]: each["function"] for each in asked.chat.tools}
    assert [*functions] == ["patch", "files__read", "files__write", "f"]
    assert 'start: "x"' in functions["patch"]["description"]
    assert functions["patch"]["parameters"]["required"] == ["input"]
    assert functions["files__read"]["description"] == "A server's.\n\nd"
    assert asked.tools.left_out == ["web_search"]
    assert read(tools=[HOSTED]).chat.tools == []


def test_a_choice_among_such_tools() -> None:
    tools = [HOSTED, CUSTOM, NAMESPACE, TOOL]
    for choice, name in (
        ({"type": "custom", "name": "patch"}, "patch"),
        ({"type": "function", "name": "read", "namespace": "files"}, "files__read"),
    ):
        chosen = read(tools=tools, tool_choice=choice).chat.tool_choice
        assert chosen == {"type": "function", "function": {"name": name}}
    allowed = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "custom", "name": "patch"}],
    }
    asked = read(tools=tools, tool_choice=allowed)
    assert asked.chat.tool_choice == "required"
    assert [each["function"]["name"] for each in asked.chat.tools] == ["patch"]
    assert read(tools=tools, tool_choice="required").chat.tool_choice == "required"


def test_calls_of_such_tools_go_back_to_the_model() -> None:
    items = [
        USER,
        {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "a\n"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
        {**called(2), "name": "read", "namespace": "files"},
        output(2),
    ]
    _, custom, done, function, _ = messages_of(input=items)
    [call_1], [call_2] = custom["tool_calls"], function["tool_calls"]
    assert call_1["function"] == {"name": "patch", "arguments": '{"input": "a\\n"}'}
    assert (done["role"], done["content"]) == ("tool", "done")
    assert call_2["function"]["name"] == "files__read"


CODEX = {
    "instructions": "Help.",
    "tools": [TOOL, HOSTED, {**CUSTOM, "format": GRAMMAR}, NAMESPACE],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "k",
    "client_metadata": {"session": "1"},
    "text": {"verbosity": "low"},
}


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_calls_come_back_in_the_form_of_their_tools(size: int) -> None:
    text = (
        '<tool_call>\n{"name": "patch", "arguments": {"input": "é\\n*** End"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "files__read", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "files__write", "arguments": {"input": "x"}}\n</tool_call>'
    )
    events, response = answered(read(**CODEX), text, "stop", size)
    custom, function, write = response["output"]
    assert (custom["type"], custom["name"], custom["input"]) == (
        *("custom_tool_call", "patch", "é\n*** End"),
    )
    assert (function["type"], function["name"], function["namespace"]) == (
        *("function_call", "read", "files"),
    )
    assert json.loads(function["arguments"]) == {"a": 1}
    assert (write["type"], write["namespace"], write["input"]) == ("custom_tool_call", "files", "x")
    deltas = [each["delta"] for each in events if each["type"].endswith("input.delta")]
    assert deltas == ["é\n*** End", "x"]
    again = read(**{**CODEX, "input": [USER, *response["output"], USER]})
    assert [
        each["function"]["name"] for each in again.chat.messages[2].model_dump()["tool_calls"]
    ] == [
        *("patch", "files__read", "files__write"),
    ]


def test_a_cut_call_of_a_custom_tool_is_what_there_is() -> None:
    text = '<tool_call>\n{"name": "patch", "arguments": {"input": "abc'
    _, response = answered(read(**CODEX), text, "length", 1000)
    [item] = response["output"]
    assert (item["status"], response["status"]) == ("incomplete", "incomplete")
    assert "abc" in item["input"]


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


def response_writer(asked: ReadRequest, **options: Any) -> ResponseWriter:
    logprobs = ContentLogprobs(lambda _: b"", ())
    return ResponseWriter(asked, {}, chat_reader(**options), logprobs, stored=True)


def answered(
    asked: ReadRequest, text: str, reason: str, size: int, **options: Any
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return an answer's events, which OpenAI's types must take, and the response."""
    writer = response_writer(asked, **options)
    sent = [*writer.begin()]
    pieces = [text[at : at + size] for at in range(0, len(text), size)] or [""]
    for at, piece in enumerate(pieces):
        last = at == len(pieces) - 1
        sent += writer.push(chunk(piece, reason if last else ""))
    sent += writer.end(chunk("", reason), lambda _: True)
    told = [json.loads(each.split(b"data: ")[1]) for each in sent]
    events = [EVENTS.validate_python(each) for each in told]
    assert [each.split(b"\n")[0].decode() for each in sent] == [f"event: {e.type}" for e in events]
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert told[-1]["response"] == writer.response
    Response.model_validate(writer.response)
    return told, writer.response


@pytest.mark.parametrize(("text", "reason", "items", "status"), ANSWERS)
@pytest.mark.parametrize("size", [1, 5, 100])
def test_an_answer_in_events(
    text: str, reason: str, items: list[tuple[str, Any]], status: str, size: int
) -> None:
    asked = read(instructions="x", metadata={"a": "b"})
    told, response = answered(asked, text, reason, size)
    assert told[-1]["type"] == f"response.{status}"
    answer = Response.model_validate(response)
    assert (answer.status, answer.instructions, answer.metadata) == (status, "x", {"a": "b"})
    assert (response["store"], answer.usage is not None) == (True, True)
    found: list[tuple[str, Any]] = []
    for item in answer.output:
        if item.type == "message":
            found.append((item.type, item.content[0].text))  # type: ignore[union-attr]
        elif item.type == "reasoning":
            found.append((item.type, item.summary[0].text))
        elif item.type == "function_call":
            found.append((item.type, json.loads(item.arguments)))
    assert found == items
    assert len({each["id"] for each in response["output"]}) == len(items)
    # what came in pieces is the whole
    for number, item in enumerate(answer.output):
        own = [each for each in told if each.get("output_index") == number]
        deltas = "".join(each["delta"] for each in own if each["type"].endswith(".delta"))
        whole = [each for each in own if each["type"].endswith((".done",))]
        assert deltas == whole[0].get("text", whole[0].get("arguments"))
        assert whole[-1]["item"] == response["output"][number]
        assert own[0]["type"] == "response.output_item.added"
        assert {each.get("item_id", item.id) for each in own} == {item.id}


@pytest.mark.parametrize("name", ["f", "patch"])
def test_items_are_in_the_order_of_the_text(name: str) -> None:
    """A chunk may hold the end of a call and the text after it, or the whole answer."""
    call = f'<tool_call>\n{{"name": "{name}", "arguments": {{"input": "abc"}}}}\n</tool_call>'
    text = f"Look.{call}Done."
    for size in range(1, len(text) + 1):
        _, response = answered(read(**CODEX), text, "stop", size)
        before, item, after = response["output"]
        assert before["content"][0]["text"] == "Look.", size
        assert item.get("input", item.get("arguments")) in ("abc", '{"input": "abc"}'), size
        assert after["content"][0]["text"] == "Done.", size


def test_a_failure_ends_the_stream_with_its_reason() -> None:
    writer = response_writer(read())
    [*_] = writer.begin()
    [*_] = writer.push(chunk("a"))
    last = json.loads([*writer.fail(Failure(504, "Too late.", "timeout"))][-1].split(b"data: ")[1])
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["message"] == "Too late."
    assert last["response"]["store"] is False
    assert last["response"]["output"][0]["status"] == "incomplete"


def test_the_answer_tells_what_was_done() -> None:
    """The model's own defaults, where it has some, and not the API's."""
    model = {"temperature": 0.25, "top_p": 0.75}
    for sent, expected in (
        ({}, model),
        ({"temperature": 0}, {**model, "temperature": 0}),
        ({"top_p": 0.5}, {**model, "top_p": 0.5}),
    ):
        response = begun_response(read(**sent), model, stored=False)
        assert {name: response[name] for name in model} == expected
    assert begun_response(read(), {}, stored=False)["temperature"] == 1.0


# --- kept answers ---------------------------------------------------------------------------------


def kept(store: ResponseStore, text: str = "Yes", owner: str = "", **sent: Any) -> dict[str, Any]:
    asked = read(store, owner, **sent)
    _, response = answered(asked, text, "stop", 1000)
    conversation = Conversation(response, [*asked.items, *response["output"]])
    assert store.keep(owner, conversation)
    return response


def test_a_conversation_goes_on_from_a_kept_answer() -> None:
    store = ResponseStore(100_000)
    first = kept(store, instructions="Be brief.")
    second = kept(store, "No", previous_response_id=first["id"], input="more")
    third = read(store, previous_response_id=second["id"], input=[USER])
    [messages], _ = third.chat.prompts_and_options()
    assert [(each["role"], text_of(each)) for each in messages] == [  # type: ignore[index]
        *(("user", "hi"), ("assistant", "Yes"), ("user", "more"), ("assistant", "No")),
        ("user", "hi"),
    ]


def text_of(message: Any) -> str:
    content = message["content"]
    return content if isinstance(content, str) else content[0]["text"]


def test_an_item_is_referred_to() -> None:
    store = ResponseStore(100_000)
    [item] = kept(store)["output"]
    items = [USER, {"type": "item_reference", "id": item["id"]}, USER]
    [_, answer, _] = read(store, input=items).items
    assert answer == item


def test_kept_answers_are_their_owners_and_not_for_ever() -> None:
    now = 0.0
    store = ResponseStore(100_000, clock=lambda: now)
    name = kept(store, owner="alice")["id"]
    assert store.conversation("bob", name) is None
    assert not store.delete("bob", name)
    with pytest.raises(Failure, match="not found"):
        read(store, "bob", previous_response_id=name)
    now = 3599.0
    assert store.conversation("alice", name) is not None
    now = 3600.0
    assert store.conversation("alice", name) is None
    name = kept(store, owner="alice")["id"]
    assert store.delete("alice", name)
    assert store.conversation("alice", name) is None
    assert store._size == 0


def test_old_answers_make_room() -> None:
    store = ResponseStore(10_000)
    names = [kept(store, input="x" * 1000)["id"] for _ in range(20)]
    there = [name for name in names if store.conversation("", name)]
    assert there == names[-len(there) :]
    assert 1 <= len(there) < 10
    assert store._size <= 10_000
    items = sum(len(each.conversation.response["output"]) for each in store._kept.values())
    assert len(store._response_of) == items
    large = Conversation({"id": "x", "output": []}, [{"content": "y" * 20_000}])
    assert not store.keep("", large)
    assert store.conversation("", names[-1]) is not None

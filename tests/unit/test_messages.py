"""What clients send reaches the model: in the form, place and under the name that it reads."""

from typing import Any

import pytest

from dflash_trt.chat.dialect import Dialect, call_numbers, convert_for_template
from dflash_trt.chat.messages import read_messages
from dflash_trt.chat.specimen import Loss
from dflash_trt.errors import RequestError
from tests.support.chats import (
    AGAIN,
    ANSWER,
    CALL,
    CHATS,
    SYSTEM,
    TOOL,
    USER,
    call,
    result,
    says,
    words,
)
from tests.support.tool_templates import NO_SYSTEM, WRITING
from tests.unit.test_tool_messages import chat_model

EACH = "{%- for m in messages %}"
KNOWN = "{% if m.role in ['system', 'user', 'assistant', 'tool'] %}"
WRITE = "{{ '[' + m.role + ']' + m.content }}"
CALLING = "{%- for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>"
TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
ALTERNATE = (
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}{% endif %}"
)
# templates by what is special about them
TEMPLATES = {
    "skips roles it does not know": f"{EACH}{KNOWN}{WRITE}{{% endif %}}{{% endfor %}}",
    "raises on roles that it does not know": f"{EACH}{KNOWN}{WRITE}{{% else %}}"
    "{{ raise_exception('role') }}{% endif %}{% endfor %}",
    "shows the first system message": "{% if messages[0].role == 'system' %}"
    "{{ messages[0].content }}{% endif %}"
    f"{EACH}{{% if m.role != 'system' %}}{WRITE}{{% endif %}}{{% endfor %}}",
    "shows the last system message": "{% set n = namespace(s='') %}"
    f"{EACH}{{% if m.role == 'system' %}}{{% set n.s = m.content %}}{{% endif %}}{{% endfor %}}"
    f"{{{{ n.s }}}}{EACH}{{% if m.role != 'system' %}}{WRITE}{{% endif %}}{{% endfor %}}",
    "takes no system message": NO_SYSTEM,
    "wants turns": f"{EACH}{ALTERNATE}{WRITE}{{% endfor %}}",
    "asks for the key": f"{TOOLS}{EACH}{{% if 'tool_calls' in m %}}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call') }}{% endif %}"
    f"{CALLING}{{% endfor %}}{{% else %}}{WRITE}{{% endif %}}{{% endfor %}}",
    "wants parts": f"{EACH}{{% for p in m.content %}}{{{{ p['text'] }}}}{{% endfor %}}"
    "{% endfor %}",
    "wants a list of tools": "{% for t in tools %}{{ t.function.name + t.function.description }}"
    f"{{% endfor %}}{EACH}{WRITE}{CALLING}{{% endfor %}}{{% endfor %}}",
    "wants functions": "{{ functions + datetime }}"
    f"{EACH}{WRITE}{CALLING}{{% endfor %}}{{% endfor %}}",
    "wants ids of 9": WRITING["[TOOL_CALLS]"],
}


@pytest.mark.parametrize("kind", CHATS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_all_of_a_chat_reaches_the_model(template: str, kind: str) -> None:
    messages = CHATS[kind]
    tools = [TOOL] if "call" in kind else []
    prompt = chat_model(TEMPLATES[template]).prompt(
        messages, tools, template_values={"add_generation_prompt": True}
    )
    assert words(messages) <= words([{"content": prompt.text}])
    assert not tools or "get_weather" in prompt.text


def test_a_chat_stays_as_it_is_where_the_template_shows_it() -> None:
    text = "".join(f"[{each['role']}]{each['content']}" for each in CHATS["system later on"])
    model = chat_model(f"{EACH}{WRITE}{{% endfor %}}")
    assert model.prompt(CHATS["system later on"], template_values={}).text == text
    assert model.chats["system later on"] == "as it is"


def test_instructions_are_one_system_message_in_their_order() -> None:
    model = chat_model(TEMPLATES["shows the first system message"])
    chat = [*CHATS["system later on"], says("developer", "developer-1")]
    assert model.prompt(chat, template_values={}).text.startswith(
        "system-1\n\nsystem-2\n\ndeveloper-1[user]"
    )
    assert model.chats["system later on"] == "instructions_in_one"


def test_what_no_arrangement_shows_is_refused_by_its_place() -> None:
    model = chat_model(TEMPLATES["skips roles it does not know"])
    with pytest.raises(RequestError, match=r"messages\[1\] of role 'critic' would be lost"):
        model.prompt([USER, says("critic", "Hm.")], template_values={})


# users and assistants alternate, where calls and results do not count; no text beside a call
STRICT = (
    f"{TOOLS}{{% set turn = namespace(user=true) %}}{EACH}{{% if m.tool_calls %}}{CALLING}"
    "{% endfor %}{% elif m.role == 'tool' %}[RESULT]{{ m.content }}{% else %}"
    "{% if (m.role == 'user') != turn.user %}{{ raise_exception('turns') }}{% endif %}"
    f"{{% set turn.user = not turn.user %}}{WRITE}{{% endif %}}{{% endfor %}}"
)
BESIDE = {**CALL, "content": "beside-1"}
BESIDE_CALLS = {
    "the first turn": [USER, BESIDE, result(1)],
    "a later turn": [USER, BESIDE, result(1), ANSWER, AGAIN],
    "two rounds of calls": [
        USER,
        BESIDE,
        result(1),
        {**BESIDE, "tool_calls": [call(2)]},
        result(2),
    ],
    "a system message": [SYSTEM, USER, BESIDE, result(1), ANSWER, AGAIN],
}


@pytest.mark.parametrize("case", BESIDE_CALLS)
def test_a_text_beside_a_call_costs_no_answer(case: str) -> None:
    messages = BESIDE_CALLS[case]
    text = chat_model(STRICT).prompt(messages, [TOOL], template_values={}).text
    assert words(messages) - {"beside-1"} <= words([{"content": text}])


def test_the_least_of_a_chat_is_left_out() -> None:
    model = chat_model(
        f"{EACH}{{% if m.role in ['user', 'assistant'] %}}{WRITE}{{% endif %}}{{% endfor %}}"
    )
    chat = [SYSTEM, USER, ANSWER, AGAIN]
    shown = model.prompt(chat, template_values={}).text
    assert words(chat) <= words([{"content": shown}])
    silent = chat_model(f"{EACH}{{% if m.role == 'user' %}}{WRITE}{{% endif %}}{{% endfor %}}")
    assert (
        silent.prompt([USER, ANSWER, AGAIN], template_values={}).text == "[user]user-1[user]user-2"
    )
    deaf = chat_model(f"{EACH}{{% if m.role != 'user' %}}{WRITE}{{% endif %}}{{% endfor %}}")
    with pytest.raises(RequestError, match=r"messages\[1\] of role 'user' would be lost"):
        deaf.prompt([ANSWER, USER], template_values={})


def test_what_matters_most_of_a_chat_is_lost_last() -> None:
    texts = Loss(instructions_and_questions=0, calls_and_results=0, texts=9)
    calls = Loss(instructions_and_questions=0, calls_and_results=1, texts=0)
    questions = Loss(instructions_and_questions=1, calls_and_results=0, texts=0)
    assert texts < calls < questions


def calls_with_ids(first: str, second: str) -> list[dict[str, Any]]:
    calls = [{**call(1), "id": first}, {**call(2), "id": second}]
    results = [
        {**result(1), "tool_call_id": first},
        {**result(2), "tool_call_id": second},
    ]
    return [USER, {**CALL, "tool_calls": calls}, *results]


@pytest.mark.parametrize(
    "ids", [("one", "one"), ("get_weather", "get_weather"), ("", ""), ("a", "")]
)
def test_calls_of_one_id_have_each_its_result(ids: tuple[str, str]) -> None:
    model = chat_model(TEMPLATES["asks for the key"])
    right = model.prompt(calls_with_ids("one", "two"), [TOOL], template_values={}).text
    assert model.prompt(calls_with_ids(*ids), [TOOL], template_values={}).text == right
    for number in (1, 2):
        assert right.count(f"result-{number}") == 1


def test_calls_of_one_id_get_ids_of_their_own() -> None:
    """Or a template that looks a call up by its id would find another one."""
    chat = read_messages(calls_with_ids("one", "one"))
    ids = [each["id"] for each in chat[1]["tool_calls"]]
    assert len(set(ids)) == 2
    assert [message["tool_call_id"] for message in chat[2:]] == ids


def test_an_id_used_in_two_turns_is_that_of_the_turn() -> None:
    turn = calls_with_ids("call_0", "call_1")
    chat = read_messages([*turn, ANSWER, *turn])
    assert [message.get("tool_call_id") for message in chat[2:4]] == ["call_0", "call_1"]
    assert chat[:4] == chat[5:]
    unanswered = read_messages([*turn[:2], AGAIN, *turn[1:]])
    calls = unanswered[3]["tool_calls"]
    assert [each["id"] for each in calls] == [m["tool_call_id"] for m in unanswered[4:]]


def test_equal_results_are_all_there() -> None:
    equal = [{**result(1), "content": "result-1"}] * 2
    chat = [USER, {**CALL, "tool_calls": [call(1), call(1)]}, *equal]
    text = chat_model(TEMPLATES["asks for the key"]).prompt(chat, [TOOL], template_values={}).text
    assert text.count("result-1") == 2


THINKING = {
    "thinking": "{% if m.thinking %}{{ m.thinking }}{% endif %}",
    "reasoning_content": "{% if m.reasoning_content %}{{ m.reasoning_content }}{% endif %}",
    "reasoning": "{{ m.reasoning or '' }}",
    "a part of the content": "{% if m.content is not string %}{% for p in m.content %}"
    "{{ p.thinking or p.text }}{% endfor %}{% endif %}",
    "in the text": "{% if '</think>' in m.content %}{{ m.content }}{% endif %}",
}


@pytest.mark.parametrize("name", THINKING)
@pytest.mark.parametrize("sent", ["reasoning_content", "reasoning", "thinking", "part"])
def test_thoughts_have_the_name_that_the_template_reads(name: str, sent: str) -> None:
    source = f"{EACH}<think>{{% if m.content is string %}}{WRITE}{{% endif %}}{THINKING[name]}"
    model = chat_model(f"{source}{CALLING}{{% endfor %}}{{% endfor %}}")
    assert model.dialect.thoughts == name
    message = {**CALL, sent: "thought-1"}
    if sent == "part":
        message = {**CALL, "content": [{"type": "thinking", "thinking": "thought-1"}]}
    assert "thought-1" in model.prompt([USER, message, result(1)], [TOOL], template_values={}).text


def test_ids_are_in_the_form_that_the_template_wants() -> None:
    chat = [USER, {**CALL, "tool_calls": [call(1), {**call(2), "id": "abcDEF123"}]}, result(1)]
    [_, calling, given] = convert_for_template(Dialect(short_ids=True), read_messages(chat))
    first, second = (each["id"] for each in calling["tool_calls"])
    assert len(first) == 9
    assert first.isalnum()
    assert (given["tool_call_id"], second) == (first, "abcDEF123")
    assert chat_model(TEMPLATES["wants ids of 9"]).dialect.short_ids


def test_the_ids_of_kimi_name_the_function_and_count_the_calls() -> None:
    """Those in its form stay, others get it; a result has the id of its call."""
    kept = {**call(2), "id": "functions.get_weather:0"}
    again = {**CALL, "tool_calls": [{**call(1), "id": "functions.other:1"}, {**call(2), "id": "x"}]}
    chat = [
        USER,
        {**CALL, "tool_calls": [call(1), kept]},
        result(1),
        says("tool", "result-2", tool_call_id="functions.get_weather:0"),
        again,
        says("tool", "result-3", tool_call_id="x"),
        {**CALL, "tool_calls": [kept]},
    ]
    form = Dialect(named_ids=True)
    shown = convert_for_template(form, read_messages(chat))
    ids = [each["id"] for message in shown for each in message.get("tool_calls", ())]
    assert ids == [f"functions.get_weather:{number}" for number in (1, 0, 2, 3, 4)]
    results = [message["tool_call_id"] for message in shown if message["role"] == "tool"]
    assert results == [f"functions.get_weather:{number}" for number in (1, 0, 3)]
    assert call_numbers(form, chat) == [1, 0, 2, 3, 4]
    assert call_numbers(Dialect(), chat) == []


READ: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "null": (says("user", "x", name=None, tool_calls=[]), says("user", "x")),
    "no content": ({"role": "user", "content": None}, says("user", "")),
    "parts": (says("user", "", content=[{"type": "text", "text": "a"}, "b"]), says("user", "a\nb")),
    "refusal part": (says("assistant", "", content=[{"type": "refusal", "refusal": "No."}]),
                     says("assistant", "No.")),
    "two thoughts": (says("assistant", "", content=[{"type": "thinking", "thinking": "a"},
                                                    {"type": "thinking", "thinking": "b"}]),
                     says("assistant", "", reasoning_content="a\nb")),
    "refusal": (says("assistant", "", refusal="No."), says("assistant", "No.")),
    "object of a tool": (says("tool", "", content={"a": 1}), says("tool", '{"a": 1}')),
    "two names of a thought": (says("assistant", "x", reasoning="t", reasoning_content="t"),
                               says("assistant", "x", reasoning_content="t")),
    "bare call": (says("assistant", "", tool_calls=[{"name": "f", "arguments": {"a": 1}}]),
                  says("assistant", "", tool_calls=[
                      {"id": "call00000", "type": "function",
                       "function": {"name": "f", "arguments": {"a": 1}}}])),
    "cut arguments": (says("assistant", "", tool_calls=[
        {"id": "a", "function": {"name": "f", "arguments": '{"cut": '}}]),
        says("assistant", "", tool_calls=[
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"cut": '}}])),
}  # fmt: skip


@pytest.mark.parametrize("case", READ)
def test_a_message_is_read_as_it_is_meant(case: str) -> None:
    sent, expected = READ[case]
    assert read_messages([sent]) == [expected]


def test_a_result_has_the_name_and_id_of_its_call() -> None:
    assert read_messages([USER, CALL, {"role": "tool", "content": "x"}])[2] == says(
        "tool", "x", tool_call_id=call(1)["id"], name="get_weather"
    )


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "messages is empty"),
        ([{"content": "x"}], r"messages\[0\] has no role"),
        ([USER, says("user", "", content=5)], r"messages\[1\].content is neither text"),
        ([says("user", "", content=[{"type": "text", "text": "a"}, {"type": "image_url"}])],
         r"messages\[0\].content\[1\]: image_url is not taken, only text"),
        ([says("user", "", content=[{"type": "text"}])], r"content\[0\]: text has no text"),
        ([says("assistant", "", tool_calls=[3])], r"tool_calls\[0\] is no call"),
        ([says("assistant", "", tool_calls="x")], r"tool_calls is no list"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named(messages: list[Any], problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        read_messages(messages)


def test_a_final_message_goes_on() -> None:
    model = chat_model(f"{EACH}{WRITE}</s>{{% endfor %}}")
    going_on: dict[str, Any] = {"continue_final_message": True, "template_values": {}}
    text = model.prompt([USER, says("assistant", "Once upon ")], **going_on).text
    assert text == "[user]user-1</s>[assistant]Once upon "
    trimmed = chat_model(f"{EACH}[{{{{ m.content | trim }}}}]{{% endfor %}}")
    assert trimmed.prompt([USER, ANSWER], **going_on).text == "[user-1][answer-1"
    for messages, values, problem in (
        ([USER], {}, "needs a last message"),
        ([USER, says("assistant", "", reasoning_content="Hm")], {}, "does not show where"),
        ([USER, ANSWER], {"add_generation_prompt": True}, "needs a last message"),
    ):
        with pytest.raises(RequestError, match=problem):
            model.prompt(messages, continue_final_message=True, template_values=values)


def test_a_final_message_goes_on_where_it_ends() -> None:
    source = (
        "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}<think>\n"
        "{{ m.reasoning_content }}\n</think>\n{% endif %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>"
        "{% endfor %}</s>{% endfor %}"
    )
    model = chat_model(source)
    going_on: dict[str, Any] = {"continue_final_message": True, "template_values": {}}
    part = {"type": "thinking", "thinking": "Hm"}
    text = {"type": "text", "text": "The"}
    for message, end, thinking in (
        ({"content": "The", "reasoning_content": "Hm"}, "<think>\nHm\n</think>\nThe", False),
        ({"content": [part, text]}, "<think>\nHm\n</think>\nThe", False),
        ({"content": [part]}, "<think>\nHm", True),
        ({"content": "", "reasoning": "Hm"}, "<think>\nHm", True),
        ({"content": "<think>\nHm"}, "<think>\nHm", True),
    ):
        prompt = model.prompt([USER, {"role": "assistant", **message}], **going_on)
        assert prompt.text == f"[user]user-1</s>[assistant]{end}"
        assert prompt.thinking is thinking
    prompt = model.prompt([USER, {**CALL, "content": "Well"}], **going_on)
    assert prompt.text.endswith("</tool_call>")


def test_a_call_is_begun_by_the_answer_that_goes_on() -> None:
    model = chat_model(f"{TOOLS}{EACH}{WRITE}{CALLING}{{% endfor %}}{{% endfor %}}")
    going_on: dict[str, Any] = {"continue_final_message": True, "template_values": {}}
    begun = says("assistant", '<tool_call>\n{"name": "get_weather", "arguments": {"ci')
    assert model.prompt([USER, begun], [TOOL], **going_on).begun == begun["content"]
    with pytest.raises(RequestError, match=r"tool_choice cannot be enforced .* within a call"):
        model.prompt([USER, begun], [TOOL], "required", **going_on)
    with pytest.raises(RequestError, match="beside tools cannot be enforced"):
        model.grammar(model.prompt([USER, begun], [TOOL], **going_on), {"type": "integer"})
    assert model.prompt([USER, ANSWER], [TOOL], "required", **going_on).grammar
    broken = {"function": {"name": "get_weather", "arguments": '{"city": "Kra'}}
    with pytest.raises(RequestError, match=r"arguments of tool_calls\[0\] .* no JSON object"):
        model.prompt([USER, {"role": "assistant", "tool_calls": [broken]}], [TOOL], **going_on)


def test_a_user_after_a_result_where_users_and_answers_alternate() -> None:
    model = chat_model(
        "{% set turn = namespace(user=true) %}{% for m in messages %}{% if m.tool_calls %}"
        "{% for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}[ARGS]"
        "{{ c.function.arguments | tojson }}{% endfor %}{% elif m.role == 'tool' %}"
        "[RESULT]{{ m.content }}{% else %}{% if (m.role == 'user') != turn.user %}"
        "{{ raise_exception('must alternate') }}{% endif %}{% set turn.user = not turn.user %}"
        "[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}{% if tools %}{{ tools | tojson }}"
        "{% endif %}"
    )
    for rounds in (1, 2):
        messages = [USER, *([CALL, result(1)] * rounds), AGAIN]
        text = model.prompt(messages, [TOOL], template_values={}).text
        assert text.count("[RESULT]result-1") == rounds
        assert "[assistant][user]user-2" in text


EFFORTS = {
    "thinks by default": "{% if enable_thinking is false %}<think></think>{% else %}<think>"
    "{% endif %}",
    "thinks when asked": "{% if enable_thinking %}<think>{% endif %}",
    "by another name": "{% if thinking %}<think>{% else %}</think>{% endif %}",
    "with a budget": "{% if thinking_budget == 0 %}<think></think>{% else %}<think>{% endif %}",
    "by effort": "{% if reasoning_effort == 'none' %}</think>{% else %}<think>{% endif %}",
}


@pytest.mark.parametrize("kind", EFFORTS)
def test_an_effort_turns_thinking_on_and_off(kind: str) -> None:
    model = chat_model("{% for m in messages %}{{ m.content }}{% endfor %}" + EFFORTS[kind])

    def thinks(**values: Any) -> bool:
        return model.prompt(
            [USER], template_values={"add_generation_prompt": True, **values}
        ).thinking

    assert not thinks(reasoning_effort="none")
    assert thinks(reasoning_effort="high")
    assert thinks(reasoning_effort="minimal")
    if "enable_thinking" in EFFORTS[kind]:
        assert thinks(reasoning_effort="none", enable_thinking=True)
        assert not thinks(reasoning_effort="high", enable_thinking=False)


def test_no_effort_is_refused_where_thinking_cannot_be_turned_off() -> None:
    always = "{% for m in messages %}{{ m.content }}{% endfor %}<think>"
    for source in (always, f"{always}{{{{ reasoning_effort }}}}"):
        with pytest.raises(RequestError, match="cannot turn thinking off"):
            chat_model(source).prompt([USER], template_values={"reasoning_effort": "none"})
    plain = chat_model("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert plain.prompt([USER], template_values={"reasoning_effort": "none"}).text == "user-1"

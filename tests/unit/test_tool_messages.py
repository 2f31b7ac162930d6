"""What templates tell of models, and chats with tools as each of them wants it."""

import json
import re
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models

from dflash_trt.chat import ChatModel, ChatPrompt
from dflash_trt.chat.dialect import Dialect, dialect_of
from dflash_trt.chat.formats import HARMONY, HERMES, REASONING_TAGS
from dflash_trt.chat.formats.harmony import MARKERS
from dflash_trt.decoding import Grammar
from dflash_trt.errors import RequestError
from dflash_trt.serving.model.requests import chat_grammar
from tests.support.tool_templates import AS_TEXT, CHATML, UNKNOWN, WRITING, renderer

TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"properties": {"city": {}}}},
}
ARGUMENTS = {"city": "Kraków"}


def call(name: str, number: int, arguments: Any = None) -> dict[str, Any]:
    text = json.dumps(ARGUMENTS if arguments is None else arguments)
    return {"id": f"call{number:05}", "function": {"name": name, "arguments": text}}


def given(number: int, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call{number:05}", "content": content}


CHAT = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": "Let me see.",
        "tool_calls": [call("get_weather", 1), call("get_time", 2, {})],
    },
    given(1, "sunny"),
    given(2, "noon"),
]


def chat_model(source: str, *special: str) -> ChatModel:
    tokenizer = Tokenizer(models.WordLevel({"x": 0}, unk_token="x"))
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in special])
    return ChatModel(tokenizer, renderer(source))


def rendered(
    source: str, messages: list[dict[str, Any]] = CHAT, tools: Any = (TOOL,), **values: Any
) -> str:
    values = {"add_generation_prompt": True, **values}
    return chat_model(source).prompt(messages, tools, template_values=values).text


@pytest.mark.parametrize("sign", WRITING, ids=str.strip)
def test_a_chat_is_what_the_template_makes_of_it(sign: str) -> None:
    text = rendered(WRITING[sign])
    assert "get_weather" in text.partition("Weather?")[0] or sign.startswith("[")
    _, _, answer = text.partition("Weather?")
    assert answer.index("get_weather") < answer.index("sunny") < answer.index("noon")
    assert "Kraków" in answer
    assert "\\" not in answer


def test_arguments_are_text_where_the_template_wants_text() -> None:
    dialect = dialect_of(renderer(AS_TEXT), {})
    assert dialect.text_arguments
    assert dialect.format is HERMES
    assert '"arguments": {"city": "Kraków"}}' in rendered(AS_TEXT)


def test_a_template_without_tools_is_told_in_words() -> None:
    system, _, rest = rendered(CHATML).partition("<|im_end|>")
    assert "Be kind.\n\n# Tools" in system
    assert f"<tools>\n{json.dumps(TOOL)}\n</tools>" in system
    assert 'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city":' in rest
    results = "<tool_response>\nsunny\n</tool_response>\n<tool_response>\nnoon\n</tool_response>"
    assert f"<|im_start|>user\n{results}<|im_end|>" in rest
    assert rendered(CHATML, CHAT[1:2]).startswith("<|im_start|>system\n# Tools")
    assert "tool" not in rendered(CHATML, CHAT[:2], [])


def test_a_form_that_is_not_known_is_told() -> None:
    assert dialect_of(renderer(UNKNOWN), {}).format is None
    assert dialect_of(renderer(CHATML), {}) == Dialect(HERMES)
    assert dialect_of(None, {}) == Dialect(HERMES)
    assert dialect_of(None, dict.fromkeys(MARKERS, 1)).format is HARMONY


def test_thoughts_are_told_by_the_tokens_or_the_template() -> None:
    assert dialect_of(renderer(WRITING["<tool_call>"]), {}).reasoning_tags is REASONING_TAGS[0]
    assert dialect_of(renderer(CHATML), {"[/THINK]": 7}).reasoning_tags is REASONING_TAGS[1]
    assert dialect_of(renderer(CHATML), {}).reasoning_tags is None


def prompt(model: ChatModel, choice: Any = "auto", **values: Any) -> ChatPrompt:
    values = {"add_generation_prompt": True, **values}
    return model.prompt(CHAT[:2], [TOOL], choice, template_values=values)


def test_a_required_call_is_a_grammar() -> None:
    model = chat_model(WRITING["[ARGS]"], "[TOOL_CALLS]", "[ARGS]", "<other>")
    named = {"type": "function", "function": {"name": "get_weather"}}
    assert prompt(model).grammar == prompt(model, "none").grammar == ""
    for choice in ("required", named):
        assert "get_weather" in prompt(model, choice).grammar
        assert "<[1]>" in prompt(model, choice).grammar  # the token [TOOL_CALLS]
    assert "+" in prompt(model, "required").grammar
    assert "call_1+" not in prompt(model, named).grammar
    # markers are text where calls may come
    assert prompt(model).hidden == {3}
    assert prompt(model, "none").hidden == model.hidden == {1, 2, 3}
    assert "get_weather" in prompt(model).text
    assert "get_weather" not in prompt(model, "none").text


def test_a_prompt_may_end_within_a_thought() -> None:
    model = chat_model(WRITING["<tool_call>"])
    assert prompt(model).thinking
    assert not prompt(model, enable_thinking=False).thinking
    assert not prompt(model, add_generation_prompt=False).thinking
    opened, closed = prompt(model, "required"), prompt(model, "required", enable_thinking=False)
    assert opened.grammar != closed.grammar


SCHEMA = Grammar("json_schema", '{"type": "object"}', "response_format")
CHOICE = Grammar("regex", "yes|no", "guided_choice")
LARK = Grammar("lark", 'start: "x"', "guided_grammar")


@pytest.mark.parametrize(
    ("choice", "asked", "expected"),
    [
        ("auto", None, None),
        ("auto", SCHEMA, "get_weather.*%json"),
        ("auto", CHOICE, CHOICE),  # for all of the text
        ("auto", LARK, LARK),
        ("none", SCHEMA, SCHEMA),
        ("none", LARK, LARK),
        ("required", SCHEMA, "get_weather"),
        ("required", CHOICE, RequestError),
    ],
)
def test_tools_and_what_is_asked_of_the_text(choice: str, asked: Any, expected: Any) -> None:
    model = chat_model(WRITING["[ARGS]"])
    chat = prompt(model, choice)
    if expected is RequestError:
        with pytest.raises(RequestError, match="are both given"):
            chat_grammar(asked, chat, model)
        return
    found = chat_grammar(asked, chat, model)
    if isinstance(expected, str):
        assert found is not None
        assert re.search(expected, found.text, re.DOTALL)
        assert ("answer" in found.text) == (choice == "auto")
    else:
        assert found == expected


def test_what_is_asked_of_the_text_comes_after_thoughts() -> None:
    model = chat_model(WRITING["<tool_call>"])  # which begins with a thought
    for values, thinks in (({}, True), ({"enable_thinking": False}, False)):
        chat = prompt(model, "none", **values)
        found = chat_grammar(SCHEMA, chat, model)
        assert found is not None
        assert ("</think>" in found.text) == thinks


def test_a_form_that_is_not_known_has_no_grammar() -> None:
    model = chat_model(UNKNOWN)
    assert "get_weather" in prompt(model).text
    with pytest.raises(RequestError, match="tool_choice"):
        prompt(model, "required")
    with pytest.raises(RequestError, match="answer beside tools cannot be enforced"):
        chat_grammar(SCHEMA, prompt(model), model)
    with pytest.raises(RequestError, match="no chat template"):
        ChatModel(Tokenizer(models.WordLevel({"x": 0}, unk_token="x")), None).prompt(
            CHAT, template_values={}
        )

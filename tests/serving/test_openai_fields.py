"""Which fields and bodies the OpenAI API takes, and what it says of the others; real Triton."""

import json
import re
from typing import Any

import httpx
import openai
import pytest
from openai import types
from openai.types.chat import completion_create_params
from pydantic import ValidationError

from dflash_trt.serving.http.failures import Failure
from dflash_trt.serving.http.fields import UNSUPPORTED, ChatFields, TextFields

PROMPT, WAIT = "def main():", 60.0
HI = [{"role": "user", "content": "hi"}]
JSON_TYPE = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"max_tokens": -1}, "max_tokens", "max_tokens is -1"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": "a" * 5000}, "prompt", "exceed"),
        ({"prompt": "\ud800"}, "prompt", "prompt holds half a character"),
        ({"max_tokens": 2**40}, "max_tokens", "must be an integer of 32 bits"),
        ({"prompt": ["a", 5]}, "prompt", "token ids"),
        ({"prompt": []}, "prompt", "1 to 64"),
        ({"prompt": ["a"] * 65}, "prompt", "1 to 64"),
        ({"prompt": [10**6]}, "prompt", "prompt holds 1000000, no token"),
        ({"prompt": [[-1], [-1]]}, "prompt", "prompt holds -1, no token"),
        ({"prompt": None}, "prompt", "Missing required parameter"),
        ({"stop": [""]}, "stop", "'stop[0]' must have at least 1 character"),
        ({"timeout": 0}, "timeout", "greater"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"guided_json": {"type": "x"}}, "guided_json", "guided_json cannot be used"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_regex", "both given"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "structural_tag"),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "structural_tag"),
        ({"guided_jsn": {}}, "guided_jsn", "Unknown parameter: 'guided_jsn'"),
        ({"prompt": [[]]}, "prompt", "prompt"),
        ({"logit_bias": {"999999": 1}}, "logit_bias", "999999"),
        ({"messages": []}, "messages", "messages"),
        ({"messages": [{"content": "x"}]}, "messages", "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "image"),
        ({"messages": [{"role": "user", "content": "a " * 9000}]}, "messages", "context length"),
        ({"messages": HI, "continue_final_message": True}, "continue_final_message", "last"),
        ({"messages": HI, "tools": [{"type": "function"}]}, "tools", "tools[0]"),
        ({"messages": HI, "guided_json": {"not": {}}}, "guided_json", "cannot be used"),
    ],
)
def test_a_bad_request(
    api: openai.OpenAI, url: str, fields: dict[str, Any], param: str | None, words: str
) -> None:
    path = "chat/completions" if "messages" in fields else "completions"
    body = {"model": "pycode", **({} if "messages" in fields else {"prompt": PROMPT}), **fields}
    for stream in (False, True):
        sent = json.dumps({**body, "stream": stream})
        answer = httpx.post(f"{url}/v1/{path}", content=sent, headers=JSON_TYPE, timeout=WAIT)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
        assert error["param"] == param
        assert words in error["message"]
        assert not re.search("text_input|stop_words|Input should|Value error", error["message"])
        assert "127.0.0.1" not in error["message"]
    assert api.completions.create(model="pycode", prompt=PROMPT, max_tokens=1).choices


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{}] * 10_000},
        {"stop": [1] * 10_000},
        {"bad_words": [1] * 10_000},
        {"tools": [1] * 10_000},
        {str(number): 1 for number in range(10_000)},
    ],
    ids=["messages", "stop", "bad_words", "tools", "unknown"],
)
def test_a_body_full_of_faults_is_not_read_to_its_end(fields: dict[str, Any]) -> None:
    """Pydantic's report of all of them took 2 GB for a body of 2 MB."""
    with pytest.raises(ValidationError) as caught:
        ChatFields.model_validate({"model": "pycode", "messages": HI, **fields})
    assert caught.value.error_count() <= 3


SHARED_FIELDS: list[tuple[str, list[Any], list[Any]]] = [
    # name, values that are accepted, values that are refused
    ("temperature", [0.5, 1], ["0.5", -1]),
    ("top_p", [0.5], [0, 2]),
    ("top_k", [-1, 0, 5], ["x", -2]),
    ("min_p", [0, 0.1], [2]),
    ("n", [1, 2], [0, 65]),
    ("seed", [-1, 2**63 - 1, -(2**63)], ["x", 2**63, -(2**63) - 1]),
    ("stop", ["x", ["x"], []], [5]),
    ("stop_token_ids", [[], [3]], [[-1], "x"]),
    ("min_tokens", [0, 1], [9, -1]),
    ("ignore_eos", [True, False], [5]),
    ("repetition_penalty", [1, 1.2], [0]),
    ("presence_penalty", [0, 1, -2], ["x", "1", 2.1]),
    ("frequency_penalty", [0, 2], ["x", -3]),
    ("bad_words", [[], ["x"]], [[""]]),
    ("priority", [0, 3], ["x"]),
    *((name, ["x", {"a": "b"}], []) for name in UNSUPPORTED["ignored"]),
    (
        "stream_options",
        [{"include_obfuscation": True}, {"continuous_usage_stats": True}],
        [{"x": 1}],
    ),
    ("skip_special_tokens", [True], [False]),
    ("spaces_between_special_tokens", [True], [False]),
    ("include_stop_str_in_output", [False], [True]),
    ("truncate_prompt_tokens", [], [5]),
    ("allowed_token_ids", [], [[5]]),
    ("logits_processors", [[]], [["x"]]),
    ("logit_bias", [{}, {"5": 1}, {"7": -100}], [{"-1": 1}, {"5": "x"}, 5]),
    ("prompt_logprobs", [], [0, 1]),
    ("return_token_ids", [False], [True]),
    ("return_tokens_as_token_ids", [False], [True]),
    ("best_of", [1], [2, "x"]),
    ("use_beam_search", [False], [True]),
    ("length_penalty", [1, 1.0], [0.5]),
    (
        "response_format",
        [{"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "schema": {}}],
        [{"type": "x"}, 5, {"type": "json_object", "x": 1}],
    ),
    (
        "structured_outputs",
        [{}, {"json": {}}, {"choice": ["a"]}],
        [{"json": 5}, {"x": 1}, 5, {"json": {}, "regex": "a"}],
    ),
    ("guided_json", [{}, {"type": "object"}, '{"type": "null"}'], ["x", {"type": "x"}]),
    ("guided_regex", ["a+"], ["(", 5]),
    ("guided_choice", [["a", "b c"]], [5, [5]]),
    ("guided_grammar", ['start: "a"'], ["start: x"]),
    ("guided_decoding_backend", [], ["xgrammar"]),
    ("guided_whitespace_pattern", [], ["a"]),
    ("cache_salt", ["x"], [1]),
    ("kv_transfer_params", [], [{}]),
]
TEXT_FIELDS: list[tuple[str, list[Any], list[Any]]] = [
    ("logprobs", [0, 2], [21]),
    ("echo", [True, False], ["x"]),
    ("suffix", [""], ["x"]),
    ("add_special_tokens", [True], [False]),
]
CHAT_FIELDS: list[tuple[str, list[Any], list[Any]]] = [
    ("logprobs", [True, False], ["x"]),
    ("top_logprobs", [2], [21]),
    ("tools", [[], [{"type": "function", "function": {"name": "f"}}]], ["x"]),
    ("tool_choice", ["auto", "none"], ["required", "x", 5, {"type": "function"}, {}, []]),
    ("parallel_tool_calls", [True, False], ["x"]),
    ("reasoning_effort", ["low", "none", "xhigh"], [5, "ultra"]),
    ("chat_template_kwargs", [{}, {"opening": "x"}], ["x", {"messages": []}]),
    ("add_generation_prompt", [True, False], [5]),
    ("echo", [False], [True]),
    ("add_special_tokens", [False], [True]),
    ("continue_final_message", [False], [5]),
    ("chat_template", [], ["x"]),
    ("documents", [[]], [[{}]]),
    ("include_reasoning", [True], [False]),
    ("mm_processor_kwargs", [{}], [{"a": 1}]),
    ("moderation", [], [{"model": "m"}]),
]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ],
    ids=str,
)
def test_fields_that_do_not_go_together(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(Failure) as caught:
        ChatFields.model_validate({"model": "m", "messages": HI, **fields}).prompts_and_options()
    assert (caught.value.status, caught.value.param) == (400, param)
    assert param in caught.value.message


@pytest.mark.parametrize(
    "fields",
    [
        {"stream_options": {}},
        {"stream_options": None, "tool_choice": None, "top_logprobs": None},
        {"top_logprobs": 0},
        {"tool_choice": "none"},
        {"tool_choice": "auto", "tools": [], "parallel_tool_calls": True},
        {"max_tokens": 1, "max_completion_tokens": 1},
    ],
    ids=str,
)
def test_fields_that_say_nothing_need_nothing(fields: dict[str, Any]) -> None:
    ChatFields.model_validate({"model": "m", "messages": HI, **fields}).prompts_and_options()


def test_each_field_of_openai_is_known() -> None:
    """It is used, a hint without effect on the answer, or refused unless it asks for nothing."""
    for fields, kind, params in (
        (ChatFields, "chat", completion_create_params.CompletionCreateParamsStreaming),
        (TextFields, "text", types.completion_create_params.CompletionCreateParamsStreaming),
    ):
        known = fields.model_fields.keys() | {*UNSUPPORTED["ignored"]}
        known |= UNSUPPORTED["both"].keys() | UNSUPPORTED[kind].keys()
        assert params.__annotations__.keys() - known == set()


@pytest.mark.parametrize(
    ("path", "table"),
    [
        ("completions", SHARED_FIELDS + TEXT_FIELDS),
        ("chat/completions", SHARED_FIELDS + CHAT_FIELDS),
    ],
    ids=["text", "chat"],
)
def test_each_field_that_clients_send(
    url: str, path: str, table: list[tuple[str, list[Any], list[Any]]]
) -> None:
    prompt = {"messages": HI} if path.startswith("chat") else {"prompt": PROMPT}
    for param, good, bad in table:
        for value in (None, *good, *bad):
            sent = {"model": "pycode", "max_tokens": 2, **prompt, param: value}
            sent |= {"stream": True} if param == "stream_options" else {}
            sent |= {"logprobs": True} if param == "top_logprobs" else {}
            sent |= {"tools": []} if param == "tool_choice" else {}
            answer = httpx.post(f"{url}/v1/{path}", json=sent, timeout=WAIT)
            if value is None or value in good:
                assert answer.status_code == 200, (param, value, answer.text)
                continue
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param), (value, answer.text)
            assert re.fullmatch(r"\S.*[.]", error["message"]), error
            assert param in error["message"]


def test_bodies_that_are_no_request(url: str) -> None:
    for content in (b"", b"{", b"[]", b"5", b"\xff\xfe", b"[" * 100_000, b'{"model": "pycode"}'):
        for path in ("completions", "chat/completions", "responses"):
            answer = httpx.post(f"{url}/v1/{path}", content=content, headers=JSON_TYPE)
            assert answer.status_code == 400
            assert answer.json()["error"]["type"] == "invalid_request_error"
    assert httpx.get(f"{url}/v1/none").json()["error"]["message"] == "Not Found"

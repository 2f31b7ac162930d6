"""Definitions of tools, and which of them a request wants to be called."""

from typing import Any

import pytest

from dflash_trt.chat.formats import chosen, parse_tools
from dflash_trt.errors import RequestError

DEFINITIONS = [
    {"type": "function", "function": {"name": name}} for name in ("get_weather", "get-time.now")
]
TOOLS = parse_tools(DEFINITIONS)


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        ([3], r"tools\[0\]"),
        ([{"type": "function"}], r"tools\[0\]"),
        ([{"type": "web_search", "function": {"name": "f"}}], r"tools\[0\]"),
        ([*DEFINITIONS, {"type": "function", "function": {"name": "a b"}}], r"tools\[2\].*name"),
        ([DEFINITIONS[0], DEFINITIONS[0]], r"tools\[1\].*get_weather"),
        (
            [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}],
            "parameters of 'f'",
        ),
        ([{"type": "function", "function": {"name": "f", "parameters": [1]}}], "parameters"),
    ],
)
def test_wrong_definitions_are_refused(tools: list[Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        parse_tools(tools)


def test_arguments_that_a_schema_does_not_name() -> None:
    def schema(parameters: dict[str, Any]) -> Any:
        function = {"name": "f", "parameters": parameters}
        return parse_tools([{"type": "function", "function": function}])[0].schema

    named = {"a": {"type": "string"}}
    assert schema({"properties": named})["additionalProperties"] is False
    assert schema({"properties": named, "additionalProperties": True})["additionalProperties"]
    assert schema({})["additionalProperties"] is False
    assert "additionalProperties" not in schema({"type": "object"})
    assert "additionalProperties" not in schema({"properties": named, "allOf": [{}]})


def test_what_has_to_be_called() -> None:
    assert chosen(TOOLS, "auto") == chosen([], "none") == []
    assert chosen(TOOLS, "required") == TOOLS
    named = {"type": "function", "function": {"name": "get_weather"}}
    assert chosen(TOOLS, named) == TOOLS[:1]
    for tools, choice in (
        (TOOLS, {"type": "function", "function": {"name": "other"}}),
        (TOOLS, {"function": {"name": "get_weather"}}),
        (TOOLS, "sometimes"),
        (TOOLS, None),
        ([], "required"),
        ([], named),
    ):
        with pytest.raises(RequestError, match="tool_choice"):
            chosen(tools, choice)

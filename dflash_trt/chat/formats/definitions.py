"""The tools of a request, and which of them must be called."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_trt.errors import RequestError
from dflash_trt.json_schema import without_annotations

NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
ELSEWHERE = {"$ref", "allOf", "anyOf", "oneOf", "patternProperties"}  # may add properties
FIX = 'Send {"type": "function", "function": {"name": "..", "parameters": {..}}}.'


@dataclass(frozen=True)
class Tool:
    """A function that a model may call; schema: JSON Schema of its arguments, an object.

    Arguments that the schema does not name are not allowed by default, as with xgrammar.
    """

    name: str
    schema: Mapping[str, Any]


def parse_tools(tools: Sequence[Any]) -> list[Tool]:
    """Return the tools; RequestError for an invalid definition."""
    result = list[Tool]()
    names = set[str]()
    for index, definition in enumerate(tools):
        tool = _tool(f"tools[{index}]", definition)
        if tool.name in names:
            raise RequestError(
                f"tools[{index}] has the name of another, {tool.name!r}",
                "Give each a name of its own.",
            )
        names.add(tool.name)
        result.append(tool)
    return result


def _tool(place: str, tool: Any) -> Tool:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type") != "function":
        raise RequestError(f"{place} is no function", FIX)
    name = function.get("name")
    parameters = function.get("parameters")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise RequestError(
            f"{place}.function.name is no name", "Use 1 to 128 of letters, digits, _, - and ."
        )
    if parameters in (None, {}):
        parameters = {"properties": {}, "additionalProperties": False}
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise RequestError(
            f"{place}.function.parameters of {name!r} describe no object",
            'Send a JSON Schema with "type": "object".',
        )
    schema: dict[str, Any] = {"type": "object"}
    if "properties" in parameters and not parameters.keys() & ELSEWHERE:
        schema["additionalProperties"] = False
    return Tool(name, schema | without_annotations(parameters))


def required_tools(tools: Sequence[Tool], choice: Any) -> list[Tool]:
    """Return those of which one must be called; none if calls are optional."""
    if choice in ("none", "auto"):
        return []
    if choice != "required":
        function = choice.get("function") if isinstance(choice, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or choice.get("type") != "function":
            raise RequestError(
                "tool_choice is not acceptable",
                'Send "auto", "none", "required" or '
                '{"type": "function", "function": {"name": ".."}}.',
            )
        tools = [tool for tool in tools if tool.name == name]
        if not tools:
            raise RequestError(
                f"tool_choice names {name[:64]!r}, which is none of the tools", "Name one of them."
            )
    if not tools:
        raise RequestError("tool_choice asks for a call, and there are no tools", "Send tools.")
    return list(tools)

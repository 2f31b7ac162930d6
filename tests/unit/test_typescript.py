"""Tools as Kimi K2.5's tokenizer class shows them; what it writes was compared with it by hand.

20,000 random schemas gave the text of its `tool_declaration_ts.py`, or none where that fails.
"""

from typing import Any

import pytest

from dflash_trt.chat.typescript import declarations, sorted_deeply

PLACE = {"type": "object", "properties": {"at": True}}


def shown(parameters: Any, **function: Any) -> str | None:
    function = {"name": "f", **function, "parameters": parameters}
    return declarations(sorted_deeply([{"type": "function", "function": function}]))


def test_a_tool_is_a_type_of_functions() -> None:
    parameters = {
        "type": "object",
        "properties": {
            "unit": {"enum": ["C", "F", None], "description": "Of the answer.", "default": "C"},
            "city": {"type": "string", "description": "Where.\n\nIn full.", "minLength": 1},
            "days": {"type": "integer", "maximum": 9, "default": 3},
            "tags": {"type": "array", "items": {"type": "string", "description": "One."}},
            "near": {"$ref": "#/$defs/Place"},
            "more": {"type": "object", "additionalProperties": {"type": ["number", "null"]}},
            "any": {"anyOf": [{"type": "boolean"}, {}, {"type": "array", "maxItems": 2}]},
        },
        "required": ["near", "city"],
        "additionalProperties": False,
        "$defs": {
            "Place": {"type": "object", "properties": {"at": True}, "description": "A place."}
        },
    }
    assert shown(parameters, description="Tell the weather.") == (
        "# Tools\n\n## functions\nnamespace functions {\n"
        "// A place.\ninterface Place {\n  at?: any\n}\n"
        "// Tell the weather.\n"
        "type f = (_: {\n"
        "  // Where.\n\n  // In full.\n  // minLength: 1\n  city: string,\n"
        "  near: Place,\n"
        "  any?: boolean | any | Array<any>,\n"
        "  // maximum: 9\n  // Default: 3\n  days?: number,\n"
        "  more?: {\n    [k: string]: number | null\n  },\n"
        "  tags?: Array<\n    // One.\n    string\n  >,\n"
        '  // Of the answer.\n  // Default: "C"\n  unit?: "C" | "F" | None,\n'
        "  [k: string]: never\n"
        "}) => any;\n}\n"
    )


def test_a_schema_that_refers_to_itself_has_a_name() -> None:
    parameters = {
        "type": "object",
        "properties": {"inner": {"$ref": "#"}, "at": {"type": "string"}},
    }
    assert shown(parameters) == (
        "# Tools\n\n## functions\nnamespace functions {\n"
        "interface parameters {\n  at?: string,\n  inner?: parameters\n}\n"
        "type f = (_: parameters) => any;\n}\n"
    )


def test_without_parameters_there_are_none() -> None:
    for parameters in ({}, None):
        text = "# Tools\n\n## functions\nnamespace functions {\ntype f = (_: {}) => any;\n}\n"
        assert shown(parameters) == text


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"type": "string"}]},
        {"const": 1},
        {"$ref": "#/definitions/A"},
        {"$ref": "#/$defs/A"},
        {"enum": [1], "type": "string"},
        {"type": ["text"]},
        {"type": "object", "additionalProperties": "no"},
    ],
)
def test_a_schema_without_such_a_form_is_shown_as_json(schema: Any) -> None:
    assert shown({"type": "object", "properties": {"a": schema}}) is None

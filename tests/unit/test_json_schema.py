"""Schemas and patterns of clients as llguidance gets them: what asserts nothing refuses nothing."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from dflash_trt.chat import parse_tools
from dflash_trt.decoding.grammar import JSON_STYLE
from dflash_trt.errors import RequestError
from dflash_trt.json_schema import FORMATS, ascii_classes, without_annotations
from dflash_trt.request_schema import GenerateRequest
from dflash_trt.serving.model.requests import grammar_of

OTHER_FORMATS = ["uri-reference", "iri", "json-pointer", "regex", "password", "binary", "byte"]
OTHER_FORMATS += ["path", "ipvanyaddress", "int32", "my-own"]
NEUTRAL: list[dict[str, Any]] = [
    {"propertyNames": True},
    {"propertyNames": {}},
    {"propertyNames": {"type": "string"}},
    {"propertyNames": {"type": "string", "description": "a key", "format": "my-own"}},
    {"uniqueItems": False},
    {"not": False},
    {"if": {"required": ["a"]}},
    {"then": {"required": ["a"]}},
    {"else": {"required": ["a"]}},
    {"minContains": 2},
    {"unevaluatedProperties": True},
    {"unevaluatedItems": {}},
    {"dependentRequired": {}},
    {"dependentSchemas": {}},
    {"$dynamicAnchor": "here"},
    {"title": "t", "deprecated": True, "x-mine": 1, "example": {}, "$comment": "c"},
]
ASSERTIONS: list[dict[str, Any]] = [
    {"propertyNames": {"type": "string", "minLength": 1}},
    {"propertyNames": False},
    {"uniqueItems": True},
    {"uniqueItems": 0},
    {"not": {}},
    {"if": {"required": ["a"]}, "then": {"required": ["b"]}},
    {"dependentRequired": {"a": ["b"]}},
]


def problem(schema: Any) -> str:
    grammar = grammar_of(GenerateRequest(text_input="a", guided_json=schema))
    assert grammar is not None
    return LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(grammar.text, JSON_STYLE))


def around(part: dict[str, Any]) -> list[dict[str, Any]]:
    whole = {"type": "object", "properties": {"a": {"type": "string"}}, **part}
    return [
        whole,
        {"type": "array", "items": whole},
        {"anyOf": [{"type": "null"}, whole]},
        {"$defs": {"d": whole}, "$ref": "#/$defs/d"},
        {"type": "object", "properties": {"format": whole}, "additionalProperties": whole},
    ]


@pytest.mark.parametrize("part", [{"format": name} for name in OTHER_FORMATS] + NEUTRAL, ids=str)
def test_what_asserts_nothing_is_left_out(part: dict[str, Any]) -> None:
    kind = {"type": "string"} if "format" in part else {}
    for schema in [part | kind, *around(part | kind)]:
        assert not problem(schema)
    function = {"name": "f", "parameters": around(part)[0]}
    [tool] = parse_tools([{"type": "function", "function": function}])
    assert not LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(dict(tool.schema)))


@pytest.mark.parametrize("part", ASSERTIONS, ids=str)
def test_what_asserts_something_stays(part: dict[str, Any]) -> None:
    for schema in around(part):
        assert problem(schema)


def test_names_and_data_are_no_keywords() -> None:
    schema = {
        "properties": {"format": {"type": "string"}, "not": {"const": {"format": "path"}}},
        "enum": [{"format": "path", "uniqueItems": False}],
        "required": ["format"],
    }
    assert without_annotations(schema) == schema


def test_the_formats_are_those_that_llguidance_follows() -> None:
    for name in FORMATS:
        schema = json.dumps({"type": "string", "format": name})
        assert not LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema))


def test_a_deep_schema_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(5000):
        schema = {"items": schema}
    with pytest.raises(RequestError, match="too deeply"):
        without_annotations(schema)


TEXTS = ("ab_", "123", "٣٣٣", "ééé", "   ", "\u00a0\u00a0\u00a0", "a.b", "]-]")


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        (r"\d{3}", "123"),
        (r"[\d]{3}", "123"),
        (r"\w{3}", "ab_ 123"),
        (r"[\w.]{3}", "ab_ 123 a.b"),
        (r"[\w-]{3}", "ab_ 123"),
        (r"[\]\d-]{3}", "123 ]-]"),
        (r"[]\d-]{3}", "123 ]-]"),
        (r"\s{3}", "   "),
        (r"\S{3}", "ab_ 123 ٣٣٣ ééé a.b ]-]"),
        (r"\D{3}", "ab_ ٣٣٣ ééé    \u00a0\u00a0\u00a0 a.b ]-]"),
        (r"[^\d]{3}", "ab_ ٣٣٣ ééé    \u00a0\u00a0\u00a0 a.b ]-]"),
        (r"[\W]{3}", "٣٣٣ ééé    \u00a0\u00a0\u00a0 ]-]"),
        (r"\\d{3}", ""),
    ],
)
def test_a_pattern_means_one_thing_everywhere(pattern: str, matched: str) -> None:
    pattern_in = {"type": "string", "pattern": f"^{pattern}$"}
    asked: list[tuple[dict[str, Any], Any]] = [
        ({"guided_regex": pattern}, str),
        ({"guided_json": pattern_in}, lambda text: json.dumps(text, ensure_ascii=False)),
    ]
    tokens = LLTokenizer("byte")
    for fields, spell in asked:
        grammar = grammar_of(GenerateRequest(text_input="a", **fields))
        assert grammar is not None
        read = getattr(LLMatcher, f"grammar_from_{grammar.kind}")(grammar.text)
        for text in TEXTS:
            matcher, ids = LLMatcher(tokens, read), list(spell(text).encode())
            took = matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
            assert took == (text in matched), (fields, text)


def test_an_escaped_choice_is_no_class() -> None:
    grammar = grammar_of(GenerateRequest(text_input="a", guided_choice=[r"\d", "[d]"]))
    assert grammar is not None
    assert ascii_classes(grammar.text) == grammar.text


FORMATS_OF_ANSWERS: list[tuple[dict[str, Any], str]] = [
    ({"type": "text"}, "free"),
    ({"type": "json_object"}, '{"type": "object"}'),
    ({"type": "json_object", "schema": {"type": "array"}}, '{"type": "array"}'),
    ({"type": "json_schema", "schema": {"type": "array"}, "name": "n"}, '{"type": "array"}'),
    ({"type": "json_schema", "json_schema": {"name": "n", "schema": True}}, "true"),
    ({"type": "text", "json_schema": None}, "free"),
    ({"type": "json_object", "schema": None, "name": None}, '{"type": "object"}'),
    ({}, "lacks"),
    ({"type": "json_schema"}, "lacks"),
    ({"type": "json_schema", "json_schema": {"name": "n", "schema": None}}, "lacks"),
    ({"type": "json_object", "shema": {}}, "holds 'shema'"),
    ({"type": "json_schema", "json_schema": {"schema": {}, "x": 1}}, "holds 'x'"),
    ({"type": "json_schema", "json_schema": {"schema": {}}, "schema": {}}, "holds 'schema'"),
    ({"type": "text", "schema": {}}, "lacks"),
    ({"type": "json_object", "json_schema": {"schema": {}}}, "holds 'json_schema'"),
]


@pytest.mark.parametrize(("value", "expected"), FORMATS_OF_ANSWERS, ids=str)
def test_all_of_a_response_format_is_followed_or_refused(
    value: dict[str, Any], expected: str
) -> None:
    asked = GenerateRequest(text_input="a", response_format=value)
    if expected.startswith(("lacks", "holds")):
        with pytest.raises(RequestError, match=expected):
            grammar_of(asked)
    else:
        grammar = grammar_of(asked)
        assert (grammar.text if grammar else "free") == expected

"""What may happen to the marks of an answer: a row for each format, all told alike.

What is right is what the models' own parsers make of it: Qwen's `qwen3coder_tool_parser` and vLLM's
`qwen3_coder` (a value ends at its end, the next parameter or the function's end), `hermes`,
`gemma4`, `kimi_k2` (the section's marks may be missing or in the singular) and `minimax_m2` (its
block ends a thought); MiniMax's docs/tool_calling_guide.md; openai/harmony's encoding (a channel's
name ends at white space or `<`); mistral-common and vLLM's Mistral parsers (an end of a thought
that was not begun is left out); and vLLM's reasoning parsers (a call's mark ends an open thought)
and `vllm/parser/qwen3.py` (`<function=` alone begins a call; a `</think>` of no thought is left
out). `MARK_EXAMPLES=15000` tries more answers than the 300 of `make test`.
"""

import json
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_trt.chat.formats import (
    FORMATS,
    HARMONY,
    REASONING_TAGS,
    AnswerParser,
    AnswerPart,
    CallDelta,
    Format,
    ReasoningTags,
    Tool,
    parse_tools,
)

EXAMPLES = os.environ.get("MARK_EXAMPLES", "")
THINK, BRACKETS, CHANNEL = REASONING_TAGS
PARAMETERS = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "string"}}}
TOOLS = parse_tools([{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}])


class Row(NamedTuple):
    """Two calls of f as a format writes them: the pieces of text between its marks, and marks.

    optional: marks that a model may leave out (not `[TOOL_CALLS]` before a list, which then is an
    answer in JSON, nor `<function=f>`, which holds the name); doubled: marks that it may write
    twice; spaced: marks that may stand after a space or line break.
    """

    format: Format
    pieces: tuple[str, ...]
    optional: tuple[int, ...]
    doubled: tuple[int, ...]
    spaced: tuple[int, ...]

    def call(self) -> str:
        return "".join(self.pieces)


def format_of(sign: str) -> Format:
    [format] = [known for known in FORMATS if known.sign == sign]
    return format


QWEN = ("<tool_call>", "\n", "<function=f>", "\n", "<parameter=a>", "\n1\n", "</parameter>", "\n",
        "<parameter=b>", "\n2\n", "</parameter>", "\n", "</function>", "\n",
        "</tool_call>")  # fmt: skip
ROWS = (
    Row(format_of("<tool_call>\n<function="), QWEN, (0, 6, 10, 12, 14), (0, 6, 10, 12, 14),
        (0, 2, 4, 6, 8, 10, 12, 14)),
    Row(format_of("<tool_call>"),
        ("<tool_call>", '\n{"name": "f", "arguments": {"a": "1", "b": "2"}}\n', "</tool_call>"),
        (0, 2), (0, 2), (0, 2)),
    Row(format_of('<minimax:tool_call>\n<invoke name="'),
        ("<minimax:tool_call>", "\n", '<invoke name="f">', "\n", '<parameter name="a">', "1",
         "</parameter>", "\n", '<parameter name="b">', "2", "</parameter>", "\n", "</invoke>", "\n",
         "</minimax:tool_call>"),
        (0, 6, 10, 12, 14), (0, 6, 10, 12, 14), (0, 2, 4, 6, 8, 10, 12, 14)),
    Row(format_of("<|tool_call_argument_begin|>"),
        ("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.f:0",
         "<|tool_call_argument_begin|>", '{"a": "1", "b": "2"}', "<|tool_call_end|>",
         "<|tool_calls_section_end|>"), (0, 1, 3, 5, 6), (0, 1, 3, 5, 6), (0, 1, 2, 3, 4, 5, 6)),
    Row(format_of("<|tool_call>"),
        ("<|tool_call>", "call:f{a:", '<|"|>', "1", '<|"|>', ",b:", '<|"|>', "2", '<|"|>', "}",
         "<tool_call|>"), (0, 2, 4, 6, 8, 10), (0, 2, 4, 6, 8, 10), (0, 2, 6, 10)),
    Row(format_of("[CALL_ID]"),
        ("[TOOL_CALLS]", "f", "[CALL_ID]", "a1B2c3D4e", "[ARGS]", '{"a": "1", "b": "2"}'),
        (0, 4), (0, 2, 4), (0, 2, 4)),
    Row(format_of("[ARGS]"), ("[TOOL_CALLS]", "f", "[ARGS]", '{"a": "1", "b": "2"}'),
        (0, 2), (0, 2), (0, 2)),
    Row(format_of("[TOOL_CALLS]"),
        ("[TOOL_CALLS]", " ", "[", '{"name": "f", "arguments": {"a": "1", "b": "2"}}', "]"),
        (2, 4), (0, 2, 4), (0, 2, 4)),
    Row(HARMONY,
        ("<|start|>", "assistant", "<|channel|>", "commentary to=functions.f ", "<|constrain|>",
         "json", "<|message|>", '{"a": "1", "b": "2"}', "<|call|>"),
        (0, 2, 4, 6, 8), (0, 2, 6, 8), (0, 2, 4, 6, 8)),
    Row(format_of('"parameters": {'),
        ("<|python_tag|>", '{"name": "f", "parameters": {"a": "1", "b": "2"}}'),
        (0,), (0,), (0,)),
)  # fmt: skip
CALLED = ("f", {"a": "1", "b": "2"})
by_format = pytest.mark.parametrize("row", ROWS, ids=[row.format.sign.strip() for row in ROWS])


class Answer(NamedTuple):
    thought: str
    content: str
    calls: list[tuple[str, str]]
    order: list[tuple[str, str]]  # its parts: what each is, and its text


def read(
    pieces: Sequence[str],
    format: Format | None,
    tags: ReasoningTags | None = None,
    thinking: bool = False,
    tools: Sequence[Tool] = TOOLS,
    begun: str = "",
    cut: bool = False,
) -> Answer:
    parser = AnswerParser(format, tools, tags, thinking=thinking, begun=begun)
    thought = ""
    content = ""
    calls: list[tuple[str, str]] = []
    order: list[tuple[str, str]] = []
    for number, piece in enumerate(pieces, 1):
        last = number == len(pieces)
        news = parser.push(piece, last=last, cut=cut and last)
        thought += news.reasoning
        content += news.content
        for part in news.parts:
            if isinstance(part, CallDelta):
                add_to_call(part, calls)
            add_in_order(part, order)
    return Answer(thought, content, calls, order)


def add_to_call(call: CallDelta, calls: list[tuple[str, str]]) -> None:
    if call.name:
        calls.append((call.name, ""))
    name, arguments = calls[call.index]
    calls[call.index] = (name, arguments + call.arguments)


def add_in_order(part: AnswerPart, order: list[tuple[str, str]]) -> None:
    kind = f"call {part.index}" if isinstance(part, CallDelta) else type(part).__name__
    text = part.arguments if isinstance(part, CallDelta) else part.text
    if order and order[-1][0] == kind:
        order[-1] = (kind, order[-1][1] + text)
    else:
        assert not isinstance(part, CallDelta) or part.id, "a call goes on behind something else"
        order.append((kind, text))


def read_alike(text: str, format: Format | None, **options: Any) -> Answer:
    """Read an answer whole and in each split of one size; all must be the same."""
    whole = read([text], format, **options)
    for size in (1, 2, 3, 5, 8):
        pieces = [text[start : start + size] for start in range(0, len(text), size)] or [""]
        assert read(pieces, format, **options) == whole, (size, text)
    return whole


def called(answer: Answer) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in answer.calls]


def called_without_space(answer: Answer) -> list[tuple[str, Any]]:
    return [
        (name, {key: value.strip() for key, value in arguments.items()})
        for name, arguments in called(answer)
    ]


@by_format
def test_a_mark_is_missing(row: Row) -> None:
    for number in row.optional:
        text = "".join(row.pieces[:number] + row.pieces[number + 1 :])
        answer = read_alike(text, row.format)
        assert (called_without_space(answer), answer.content.strip()) == ([CALLED], ""), text


@by_format
def test_a_mark_is_written_twice(row: Row) -> None:
    for number in row.doubled:
        for between in ("", " ", "\n"):
            mark = row.pieces[number]
            pieces = (*row.pieces[:number], f"{mark}{between}{mark}", *row.pieces[number + 1 :])
            answer = read_alike("".join(pieces), row.format)
            assert called(answer) == [CALLED], pieces
            assert answer.content.strip() == "", pieces


@by_format
def test_a_mark_stands_after_space(row: Row) -> None:
    for number in row.spaced:
        for space in (" ", "\n", " \n "):
            pieces = (*row.pieces[:number], space, *row.pieces[number:])
            answer = read_alike("".join(pieces), row.format)
            assert called_without_space(answer) == [CALLED], pieces
            assert answer.content.strip() == "", pieces


@by_format
def test_the_text_ends_anywhere(row: Row) -> None:
    text = row.call()
    for end in range(len(text)):
        ended = read_alike(text[:end], row.format)
        assert all(isinstance(arguments, dict) for _, arguments in called(ended))
        cut = read_alike(text[:end], row.format, cut=True)
        assert [name for name, _ in cut.calls] == [name for name, _ in ended.calls]
    assert called(read_alike(text, row.format, cut=True)) == [CALLED]


@pytest.mark.parametrize("tags", REASONING_TAGS, ids=lambda tags: tags.open)
@pytest.mark.parametrize("thinking", [True, False], ids=["by the prompt", "by the model"])
@by_format
def test_a_call_in_an_open_thought(row: Row, tags: ReasoningTags, thinking: bool) -> None:
    if row.format is HARMONY:
        text = f"<|channel|>analysis<|message|>I need a look.{row.call()}"
        assert called(read_alike(text, HARMONY)) == [CALLED]
        return
    opened = "" if thinking else f"{tags.open}{tags.label}"
    for text in ("", "I need a look.\n"):
        for calls in (1, 2):
            several = row.call() if calls == 1 else f"{row.call()}\n{row.call()}"
            answer = read_alike(
                f"{opened}{text}{several}", row.format, tags=tags, thinking=thinking
            )
            assert answer.thought == text.strip()
            wanted = 1 if row.format.is_bare and calls == 2 else calls
            assert len(called(answer)) >= wanted
            assert answer.content == ""
    closed = f"{opened}Hm {row.call()[:14]}{tags.close}\n\nHi"
    if not row.format.is_special:
        assert read_alike(closed, row.format, tags=tags, thinking=thinking)[1:3] == ("Hi", [])
        rehearsed = f"{opened}Hm {row.call()} or so{tags.close}\n\nHi {row.call()}"
        answer = read_alike(rehearsed, row.format, tags=tags, thinking=thinking)
        assert (answer.thought, answer.content) == (f"Hm {row.call()} or so", "Hi")
        assert called(answer) == [CALLED]


@pytest.mark.parametrize("tags", REASONING_TAGS, ids=lambda tags: tags.open)
def test_the_marks_of_a_thought(tags: ReasoningTags) -> None:
    opened, close = f"{tags.open}{tags.label}", tags.close
    for text in (
        f"{opened}Hm{close}Hi",
        f"\n {opened}\nHm\n{close}\n\nHi",
        f"{tags.open}{opened}Hm{close}{close}Hi",
        f"{tags.open} {tags.open} {tags.label}Hm {close} {close}Hi",
    ):
        assert read_alike(text, None, tags=tags)[:3] == ("Hm", "Hi", []), text
    for text in (f"Hm{close}Hi", f"{opened}Hm{close}\n{close}Hi", f"\n{tags.open}\nHm{close}Hi"):
        assert read_alike(text, None, tags=tags, thinking=True)[:3] == ("Hm", "Hi", []), text
    assert read_alike(f"{opened}Hm", None, tags=tags)[:3] == ("Hm", "", [])
    assert read_alike(f"{opened}{close}", None, tags=tags)[:3] == ("", "", [])
    assert read_alike(f"Hm{close}Hi", None, tags=tags)[:3] == ("", "HmHi", [])
    assert read_alike(f"Hi\n{close}\nyou", None, tags=tags)[:3] == ("", "Hi\n\nyou", [])
    assert read_alike(f"\n{close}\n\nHi", None, tags=tags)[:3] == ("", "Hi", [])
    two = read_alike(f"{opened}Hm{close}\n{opened}so{close}Hi", None, tags=tags)
    assert (two.thought.split(), two.content) == (["Hm", "so"], "Hi")
    if tags.is_special:
        assert read_alike(f"Hi {opened}Hm{close} you", None, tags=tags)[0] == "Hm"
        return
    for text in (f'split("{close}")', f"the {close} tag", f"Hi <think>Hm{close} you"):
        assert read_alike(text, None, tags=tags)[:3] == ("", text, [])


JSON_CALL = '{"name": "f", "arguments": {"a": "1", "b": "2"}}'
TWICE = [CALLED, CALLED]
KIMI = "<|tool_call_argument_begin|>"
SECTION = "<|tool_calls_section_begin|>"
END_SECTION = "<|tool_calls_section_end|>"
SINGULAR = "<|tool_call_section_begin|>"
END_SINGULAR = "<|tool_call_section_end|>"
MINIMAX = '<minimax:tool_call>\n<invoke name="'
INVOKE = (
    '<invoke name="f">\n<parameter name="a">1</parameter>\n<parameter name="b">2</parameter>\n'
    "</invoke>"
)


def kimi(call_id: str) -> str:
    return f'<|tool_call_begin|>{call_id}{KIMI}{{"a": "1", "b": "2"}}<|tool_call_end|>'


@pytest.mark.parametrize(
    ("sign", "text", "wanted"),
    [
        ("<tool_call>", f"<tool_call>{JSON_CALL}{JSON_CALL}</tool_call>", TWICE),
        ("<tool_call>", f"<tool_call>\n[{JSON_CALL}, {JSON_CALL}]\n</tool_call>", TWICE),
        ("<tool_call>", f"<tool_call>{JSON_CALL}}}</tool_call>", [CALLED]),
        ("<tool_call>", f"<tool_call>\r\n{JSON_CALL}\r\n</tool_call>\r\n", [CALLED]),
        ("<tool_call>", f"{JSON_CALL}\n</tool_call>\n{JSON_CALL}\n</tool_call>", TWICE),
        ("<tool_call>\n<function=", "".join(QWEN).replace("\n", "\r\n"), [CALLED]),
        ("<tool_call>\n<function=", "".join(QWEN).replace("=f>", '="f">'), [CALLED]),
        ("<|tool_call>", "<|tool_call>call:f{a:1,b:2}call:f{a:1,b:2}<tool_call|>", TWICE),
        ("<|tool_call>", "<|tool_call>call:f{a:1,b:2},call:f{a:1,b:2}<tool_call|>", TWICE),
        ("<tool_call>\n<function=", f"<tool_call>\n{JSON_CALL}\n</tool_call>", [CALLED]),
        ("<|tool_call>", "<|tool_call>call:f<tool_call|>", [("f", {})]),
        ("<|tool_call>", "<|tool_call>call:f{c:[1,2,],d:3,}<tool_call|>",
         [("f", {"c": [1, 2], "d": 3})]),
        ("[ARGS]", '[TOOL_CALLS]f[ARGS]{"a": "1", "b": "2"}f[ARGS]{}', [CALLED, ("f", {})]),
        ("[ARGS]", "[TOOL_CALLS]f[ARGS][TOOL_CALLS]f[ARGS]", [("f", {}), ("f", {})]),
        ("[TOOL_CALLS]", f"[TOOL_CALLS] [{JSON_CALL} {JSON_CALL}]", TWICE),
        ('"parameters": {', f"{JSON_CALL}, {JSON_CALL}", TWICE),
        (KIMI, kimi("functions.f:0") + kimi("functions.f:1"), TWICE),
        (KIMI, f"{SECTION}{kimi('functions.f:0')}{kimi('functions.f:1')}{END_SECTION}", TWICE),
        (KIMI, f"{SECTION}\n{kimi('functions.f:0')}\n{kimi('functions.f:1')}\n", TWICE),
        (KIMI, f"{SINGULAR}{kimi('functions.f:0')}{END_SINGULAR}", [CALLED]),
        (KIMI, f"{SECTION}{SECTION}{kimi('functions.f:0')}{END_SINGULAR}{END_SECTION}", [CALLED]),
        (KIMI, kimi("functions.f:0").removesuffix("<|tool_call_end|>") + END_SECTION, [CALLED]),
        (KIMI, kimi("functions.f:0").removeprefix("<|tool_call_begin|>"), [CALLED]),
        (KIMI, f"functions.f:0 {KIMI} " + '{"a": "1", "b": "2"}', [CALLED]),
        (KIMI, kimi("f:0") + kimi("f"), TWICE),
        (KIMI, f"{SECTION}<|tool_call_begin|>functions.f:0{KIMI}<|tool_call_end|>", [("f", {})]),
        (MINIMAX, f"<minimax:tool_call>\n{INVOKE}\n{INVOKE}\n</minimax:tool_call>", TWICE),
        (MINIMAX, f"<minimax:tool_call>{INVOKE}{INVOKE}</minimax:tool_call>", TWICE),
        (MINIMAX, INVOKE.replace('"', "'"), [CALLED]),
        (MINIMAX, INVOKE.replace('"', ""), [CALLED]),
        (MINIMAX, f"{INVOKE}\n</minimax:tool_call>", [CALLED]),
        (MINIMAX, f"<minimax:tool_call>\n{JSON_CALL}\n</minimax:tool_call>", [CALLED]),
        ("functions.", "<|channel|>commentary to=functions.f<|message|><|call|>", [("f", {})]),
        ("functions.", "<|channel|>commentary to=f<|message|>{}<|call|>", [("f", {})]),
    ],
)  # fmt: skip
def test_calls_with_other_signs_between(sign: str, text: str, wanted: list[Any]) -> None:
    answer = read_alike(text, format_of(sign))
    assert (called(answer), answer.content) == (wanted, "")


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ('"{\\"a\\": \\"1\\"}"', {"a": "1"}),
        ("null", {}),
        ('{"a": NaN, "b": -Infinity,}', {"a": None, "b": None}),
        ('{"a": "\\ud83d\\ude42"}', {"a": "🙂"}),
        ('{"a": "\\ud83d x \\ude42"}', {"a": "\ufffd x \ufffd"}),
        ('{"a": "\\ud83d\\ud83d\\ude42"}', {"a": "\ufffd🙂"}),
        ('{"\\ud83d": "\\ud83d\\n"}', {"\ufffd": "\ufffd\n"}),
    ],
)
def test_arguments_in_other_forms(arguments: str, wanted: Any) -> None:
    for sign, key, start in (
        ("<tool_call>", "arguments", "<tool_call>"),
        ("[TOOL_CALLS]", "arguments", "[TOOL_CALLS] ["),
        ('"parameters": {', "parameters", ""),
    ):
        text = f'{start}{{"name": "f", "{key}": {arguments}}}'
        assert called(read_alike(text, format_of(sign))) == [("f", wanted)]


@pytest.mark.parametrize(
    "text",
    [JSON_CALL, f"{JSON_CALL} is a call", f"{JSON_CALL[:30]}</tool_call>", '{"name": "g"}',
     '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
     "<tool_call>{\"name\": \"f\", \"arguments\": {'a': 1}}</tool_call>"],
)  # fmt: skip
def test_json_of_an_answer_is_no_call(text: str) -> None:
    assert read_alike(text, format_of("<tool_call>"))[:3] == ("", text, [])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("analysis<|message|>hm<|end|>{final}", ("hm", "Hi")),
        ("<|channel|>analysis code<|message|>hm<|end|>{final}", ("hm", "Hi")),
        ("<|channel|>analysis\n<|message|>hm<|end|>{final}", ("hm", "Hi")),
        ("<|channel|> analysis<|message|>hm<|end|>{final}", ("hm", "Hi")),
        ("<|channel|>analysis hm<|end|>{final}", ("hm", "Hi")),
        ("<|channel|>analysis<|message|>hm{final}", ("hm", "Hi")),
        ("<|channel|>analysis<|message|><|message|>hm<|end|><|end|>{final}", ("hm", "Hi")),
        ("<|channel|>analysis<|message|>hm<|end|>assistant<|channel|>final<|message|>Hi",
         ("hm", "Hi")),
        ("<|channel|>analysis<|message|>hm<|channel|>final<|message|>Hi<|end|>", ("hm", "Hi")),
        ("<|channel|>analysis<|message|>hm<|end|><|start|>{final}", ("hm", "Hi")),
        ("<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|chan", ("hm", "")),
        ("<|channel|>analysisx<|message|>hm", ("", "hm")),
        ("Hi<|end|>", ("", "Hi")),
    ],
)  # fmt: skip
def test_the_headers_of_channels(text: str, expected: tuple[str, str]) -> None:
    final = "<|start|>assistant<|channel|>final<|message|>Hi"
    assert read_alike(text.replace("{final}", final), HARMONY)[:2] == expected


def test_an_answer_goes_on_where_it_was() -> None:
    hermes = format_of("<tool_call>")
    begun = '<tool_call>\n{"name": "f", "arguments": {"a": "1'
    going_on = read_alike('", "b": "2"}}\n</tool_call>', hermes, begun=begun)
    assert (called(going_on), going_on.content) == ([CALLED], "")
    for text, start, expected in (
        (" more</think>Hi", "<think>Hm", (" more", "Hi", [])),
        (" you <think>", "<think>Hm</think>Hi", ("", " you <think>", [])),
        ("you", "Hi ", ("", "you", [])),
    ):
        assert read_alike(text, hermes, tags=THINK, begun=start)[:3] == expected
    thought = "<|channel|>analysis<|message|>Hm"
    final = " so<|end|><|start|>assistant<|channel|>final<|message|>Hi"
    assert read_alike(final, HARMONY, begun=thought)[:3] == (" so", "Hi", [])


VALUES = (
    "</parameter> ends one",
    "a </function> b",
    "see <parameter=b> in code",
    "x\n</function>\n</tool_call>\nand text",
    "<parameter=c>\n1\n</parameter>",
    "<parameter=b>\n1\n</parameter>",
    "".join(QWEN),
)


@pytest.mark.parametrize("value", VALUES)
def test_a_value_that_holds_markup_is_whole(value: str) -> None:
    text = (
        f"<tool_call>\n<function=f>\n<parameter=a>\n{value}\n</parameter>\n"
        "<parameter=b>\n2\n</parameter>\n</function>\n</tool_call>"
    )
    answer = read_alike(text, format_of("<tool_call>\n<function="))
    assert called(answer) == [("f", {"a": value, "b": "2"})]


DEFS = {
    "Zip": {"type": "string"},
    "Number": {"type": "integer"},
    "Same": {"$ref": "#/$defs/Zip"},
    "Circle": {"$ref": "#/$defs/Circle"},
    "Outer": {"$defs": {"Inner": {"type": "integer"}}},
}
WHOLE = {"type": "integer"}


@pytest.mark.parametrize(
    ("schema", "value", "wanted"),
    [
        ({"$ref": "#/$defs/Zip"}, "012", "012"),
        ({"$ref": "#/$defs/Same"}, "12", "12"),
        ({"$ref": "#/$defs/Circle"}, "12", "12"),
        ({"$ref": "#/definitions/Old"}, "12", 12),
        ({"$ref": "#/$defs/Outer/$defs/Inner"}, "12", 12),
        ({"anyOf": [{"$ref": "#/$defs/Zip"}, {"type": "null"}]}, "12", "12"),
        ({"anyOf": [{"$ref": "#/$defs/Number"}, {"type": "null"}]}, "12", 12),
        ({"anyOf": [{"$ref": "#/$defs/Number"}, {"type": "null"}]}, "null", None),
        ({"allOf": [{"$ref": "#/$defs/Number"}], "description": "d"}, "12", 12),
        ({"const": True}, "true", True),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"properties": {"a": WHOLE}}, '{"a": 1}', {"a": 1}),
        ({"items": WHOLE}, "[1]", [1]),
        ({"minimum": 1}, "12", 12),
        ({}, "12", "12"),
        (True, "12", "12"),
    ],
)
def test_values_have_the_types_of_their_schemas(schema: Any, value: str, wanted: Any) -> None:
    of_all = {"$defs": DEFS, "definitions": {"Old": WHOLE}}
    named = {"type": "object", "properties": {"x": schema}}
    for parameters in (
        {**named, **of_all},
        {"type": "object", "additionalProperties": schema, **of_all},
        {"$ref": "#/$defs/All", **of_all, "$defs": {**DEFS, "All": named}},
        {"type": "object", "allOf": [named], **of_all},
    ):
        tools = [Tool("f", parameters)]
        text = (
            "<tool_call>\n<function=f>\n<parameter=x>\n"
            f"{value}\n</parameter>\n</function>\n</tool_call>"
        )
        answer = read_alike(text, format_of("<tool_call>\n<function="), tools=tools)
        assert called(answer) == [("f", {"x": wanted})]


@pytest.mark.parametrize(
    ("sent", "before", "shown"),
    [
        (["functions.f:0", "functions.f:1"], [], ["functions.f:0", "functions.f:1"]),
        (["functions.f:7"], [], ["functions.f:7"]),
        (["functions.f:2"], [0, 1], ["functions.f:2"]),
        (["functions.f:0"], [0, 1], ["functions.f:2"]),
        (["functions.f:0", "functions.f:0"], [], ["functions.f:0", "functions.f:1"]),
        (["f", "f"], [0], ["functions.f:1", "functions.f:2"]),
        (["f:3"], [], ["f:3"]),
    ],
)
def test_the_ids_of_kimi_count_the_calls_of_a_conversation(
    sent: list[str], before: list[int], shown: list[str]
) -> None:
    text = f"{SECTION}{''.join(map(kimi, sent))}{END_SECTION}"
    for pieces in ([text], [*text]):
        parser = AnswerParser(format_of(KIMI), TOOLS, None, numbers=before)
        news = [parser.push(piece, last=False) for piece in pieces]
        assert [call.id for part in news for call in part.calls if call.name] == shown


@pytest.mark.parametrize(
    "value",
    ["1 line\n", "\t1\n\n", " ", "", "see </parameter> here", 'see <parameter name="b"> in code',
     "x\n</invoke>\n</minimax:tool_call>\nand text", INVOKE, '<parameter name="c">1</parameter>'],
)  # fmt: skip
def test_a_value_of_minimax_is_what_stands_between_its_tags(value: str) -> None:
    text = (
        f'<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">{value}</parameter>\n'
        '<parameter name="b">2</parameter>\n</invoke>\n</minimax:tool_call>'
    )
    assert called(read_alike(text, format_of(MINIMAX))) == [("f", {"a": value, "b": "2"})]
    lines = text.replace(f">{value}<", f">\n{value}\n<", 1)
    assert called(read_alike(lines, format_of(MINIMAX))) == [("f", {"a": value, "b": "2"})]


def test_a_call_of_minimax_comes_parameter_by_parameter() -> None:
    parser = AnswerParser(format_of(MINIMAX), TOOLS, None)
    shown = ""
    for piece, arguments in (
        ('<minimax:tool_call>\n<invoke name="f">', "{"),
        ('\n<parameter name="a">1 st', '{"a": "1 st'),
        ("reet</parameter>\n<par", '{"a": "1 street'),  # the tag may yet belong to the value
        ('ameter name="b">2</parameter>\n', '{"a": "1 street", "b": "2'),
        ("</invoke>\n</minimax:tool_call>", '{"a": "1 street", "b": "2"}'),
    ):
        shown += "".join(call.arguments for call in parser.push(piece, last=False).calls)
        assert shown == arguments


MARKUP = st.sampled_from(
    sorted({mark for row in ROWS for mark in (*row.pieces, *row.format.markers)})
    + [mark for tags in REASONING_TAGS for mark in (tags.open, tags.close)]
)
WORDS = st.sampled_from(
    ["Hi", " ", "\n", "\r\n", "1 < 2", '"', "{", "}", "[", "]", ",", "\\", "\\d", "\\ud83d",
     "\\ude42", "ü 🙂", "<", "tru", "null", "to=f", '{"name": "f"', "f[ARGS]", "call:f{"]
)  # fmt: skip


@st.composite
def answers(draw: st.DrawFn) -> tuple[Row, str, dict[str, Any]]:
    """Draw a call with broken marks, in a text or a thought."""
    row = draw(st.sampled_from(ROWS))
    tags = draw(st.sampled_from([None, *REASONING_TAGS]))
    pieces = [draw(st.sampled_from(["", "Hi ", "Hm\n"])), *row.pieces]
    pieces += draw(st.sampled_from([(), ("\n", *row.pieces), (" So?",)]))
    if tags and draw(st.booleans()):
        pieces = [tags.open, tags.label, "Hm", draw(st.sampled_from(["", tags.close])), *pieces]
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.integers(0, len(pieces) - 1))
        change = draw(st.sampled_from(["leave out", "twice", "add", "mark", "cut"]))
        if change == "leave out":
            pieces[place] = ""
        elif change == "twice":
            pieces[place] *= 2
        elif change == "cut":
            pieces[place] = pieces[place][: draw(st.integers(0, len(pieces[place])))]
        else:
            pieces.insert(place, draw(WORDS if change == "add" else MARKUP))
    text = "".join(pieces)
    if draw(st.booleans()):
        text = text[: draw(st.integers(0, len(text)))]
    return row, text, {"tags": tags, "thinking": bool(tags) and draw(st.booleans())}


@settings(
    max_examples=int(EXAMPLES or 300),
    deadline=None,
    derandomize=not EXAMPLES,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(answers(), st.lists(st.integers(1, 12), min_size=1), st.booleans())
def test_whole_equals_stream(
    answer: tuple[Row, str, dict[str, Any]], sizes: list[int], cut: bool
) -> None:
    row, text, options = answer
    pieces = []
    start = 0
    while start < len(text):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(text[start : start + size])
        start += size
    whole = read([text], row.format, cut=cut, **options)
    assert read([*pieces, ""], row.format, cut=cut, **options) == whole
    assert read(pieces or [""], row.format, cut=cut, **options) == whole
    if not cut:
        assert all(isinstance(value, dict) for _, value in called(whole))

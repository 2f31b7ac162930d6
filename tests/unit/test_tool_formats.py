"""Tools: definitions; what templates write is read, in any split; grammars admit nothing else."""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel

from dflash_trt.chat.dialect import dialect_of
from dflash_trt.chat.formats import (
    FORMATS,
    HARMONY,
    HERMES,
    REASONING_TAGS,
    AnswerParser,
    Format,
    ReasoningTags,
    Tool,
    grammar,
    parse_tools,
    required_tools,
)
from dflash_trt.chat.formats.harmony import CALL, KIND
from dflash_trt.chat.formats.reader import overlap
from dflash_trt.chat.templates import Template
from dflash_trt.errors import RequestError
from tests.support.tool_templates import WRITING, renderer

OUTPUTS = 100
HEADERS = (
    "<|im_start|>assistant\n",
    "<|start_header_id|>assistant<|end_header_id|>",
    "]~!b[]~b]system\n[e~[\n]~b]ai\n",
    "<|im_assistant|>assistant<|im_middle|><think></think>",
)
SCHEMA = {
    "type": "object",
    "properties": {
        "where": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["°C", '"F"']},
        "exact": {"type": "boolean"},
        "near": {"$ref": "#/$defs/place"},
        "tags": {"type": "array", "items": {"type": ["number", "null"]}},
    },
    "required": ["where", "near"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "in": {"$ref": "#/$defs/place"}},
            "required": ["name"],
            "additionalProperties": False,
        }
    },
}
DEFINITIONS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "get-time.now"}},
]
TOOLS = parse_tools(DEFINITIONS)
THINK = REASONING_TAGS[0]
KIMI = "<|tool_call_argument_begin|>"
MINIMAX = '<minimax:tool_call>\n<invoke name="'
WORDS = ["Paris", "ü 東京 🙂", 'he said "no"', "a\\b\\", "{[}", "<tool_call", "1\n2", "", " x "]
every = pytest.mark.parametrize("format", FORMATS, ids=[each.sign.strip() for each in FORMATS])

Outcome = tuple[str, str, list[tuple[str, str]]]  # thought, said, calls with their arguments


def read(
    format: Format | None,
    pieces: Sequence[str],
    tools: Sequence[Tool] = TOOLS,
    reasoning_tags: ReasoningTags | None = None,
    thinking: bool = False,
    cut: bool = False,
) -> Outcome:
    """Parse an answer given in pieces, and check what holds for any stream of deltas."""
    answer = AnswerParser(format, tools, reasoning_tags, thinking=thinking)
    thought, said = "", ""
    calls: list[tuple[str, str]] = []
    for at, piece in enumerate([*pieces, ""]):
        news = answer.push(piece, last=at == len(pieces), cut=cut and at == len(pieces))
        thought, said = thought + news.reasoning, said + news.content
        for delta in news.calls:
            if delta.index == len(calls):
                assert len(delta.id) == 9 or format.name == "kimi_k2"
                assert delta.name
                calls.append((delta.name, ""))
            else:
                assert (delta.index, delta.id, delta.name) == (len(calls) - 1, "", "")
            name, arguments = calls[-1]
            calls[-1] = name, arguments + delta.arguments
    return thought, said, calls


def read_any_way(format: Format | None, text: str, **options: Any) -> Outcome:
    """Parse it whole, split at every character and at some places; all must agree."""
    whole = read(format, [text], **options)
    assert read(format, list(text), **options) == whole
    for size in (2, 3, 7):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert read(format, pieces, **options) == whole
    return whole


def place(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    inner = {"in": place(rng, depth + 1)} if depth < 3 and rng.random() < 0.5 else {}
    return {"name": rng.choice(WORDS), **inner}


def random_call(rng: random.Random) -> tuple[str, dict[str, Any]]:
    if rng.random() < 0.2:
        return "get-time.now", {}
    arguments: dict[str, Any] = {
        "where": rng.choice(WORDS),
        "days": rng.randint(-9, 10**6),
        "unit": rng.choice(["°C", '"F"']),
        "exact": rng.random() < 0.5,
        "near": place(rng),
        "tags": [rng.choice([0.5, -3, None, 1e9]) for _ in range(rng.randint(0, 3))],
    }
    optional = ("days", "unit", "exact", "tags")
    left = {name: v for name, v in arguments.items() if name not in optional or rng.random() < 0.7}
    return "get_weather", left


@pytest.fixture(scope="module")
def write() -> Callable[..., str]:
    """Return `write(format, calls, content)`: the message as the format's template writes it."""
    templates = {sign: Template(source) for sign, source in WRITING.items()}

    def written(format: Format, calls: Sequence[tuple[str, dict[str, Any]]], content: str) -> str:
        message = {
            "role": "assistant",
            "content": content,
            "tool_calls": [
                {"id": f"call{at:05}", "function": {"name": name, "arguments": arguments}}
                for at, (name, arguments) in enumerate(calls)
            ],
        }
        if format.name == "kimi_k2":
            for at, call in enumerate(message["tool_calls"]):
                call["id"] = f"functions.{call['function']['name']}:{at}"
        text = templates[format.sign](messages=[message], eos_token="")
        for header in HEADERS:
            text = text.removeprefix(header)
        for end in ("<|im_end|>\n", "<|im_end|>", "<|eot_id|>", "[e~[\n", CALL):
            text = text.removesuffix(end)
        return text

    return written


def several(format: Format) -> bool:
    """Return whether its templates write several calls in a message, or a text before one."""
    return format.name not in ("llama3_json", "openai")


def random_outputs(
    format: Format, write: Callable[..., str]
) -> Iterator[tuple[str, list[tuple[str, dict[str, Any]]], str]]:
    for seed in range(OUTPUTS):
        rng = random.Random(seed)
        calls = [random_call(rng) for _ in range(rng.randint(1, 3) if several(format) else 1)]
        content = rng.choice(["", "Let me see. ü 🙂", "<b>1 < 2</b>"]) if several(format) else ""
        yield write(format, calls, content), calls, content


@every
def test_calls_are_read_as_templates_write_them(format: Format, write: Callable[..., str]) -> None:
    for text, calls, content in random_outputs(format, write):
        thought, said, found = read_any_way(format, text)
        assert (thought, said) == ("", content), text
        assert [(name, json.loads(arguments)) for name, arguments in found] == calls, text
        if format.name not in ("qwen3_coder", "gemma4", "minimax_m2"):  # as it stands there
            assert all(arguments in text for _, arguments in found)


@every
def test_text_around_calls_is_said(format: Format, write: Callable[..., str]) -> None:
    one = write(format, [("get-time.now", {})], "").strip()
    thought, said, calls = read_any_way(format, one)
    assert (thought, said, calls) == ("", "", [("get-time.now", "{}")])
    if format.name == "llama3_json":
        assert read_any_way(format, f"Well: {one}") == ("", f"Well: {one}", [])
        assert read_any_way(format, f"Well: <|python_tag|>{one}")[1:] == ("Well:", calls)
        assert read_any_way(format, f"{one}; {one}\n<|python_tag|>{one}")[2] == calls * 3
    elif format.name != "openai":
        assert read_any_way(format, f"Well:\n{one}\nSo?")[1:] == ("Well:\nSo?", calls)
        assert read_any_way(format, one + one)[2] == calls * 2


@every
def test_what_is_cut_off_is_not_lost(format: Format, write: Callable[..., str]) -> None:
    calls = [("get_weather", {"where": "a\\\n{ü", "near": {"name": "x"}}), ("get-time.now", {})]
    text = write(format, calls if several(format) else calls[:1], "")
    _, _, whole = read(format, [text])
    for end in range(len(text)):
        _, said, found = read_any_way(format, text[:end], cut=True)
        if not found and format.name != "openai":
            assert said == text[:end]
        if any(overlap(text[:end], marker) for marker in ('<|"|>', "</parameter>")):
            continue  # arguments may end with half of it
        for (name, arguments), (full_name, full) in zip(found, whole, strict=False):
            assert name == full_name
            assert full.startswith(arguments)
        assert len(found) <= len(whole)


@every
def test_broken_calls_are_said(format: Format, write: Callable[..., str]) -> None:
    """Characters are missing or added: splits parse alike; without a call all is content."""
    for seed, (text, _, _) in enumerate(random_outputs(format, write)):
        rng = random.Random(seed)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(text) + 1)
            text = text[:at] + rng.choice(["", '"', "}", "{", "<", "[", "x"]) + text[at + 1 :]
        _, said, calls = read_any_way(format, text)
        if not calls and format.name != "openai":
            assert said == text
        assert all(name for name, _ in calls)


@pytest.mark.parametrize(
    ("sign", "text"),
    [
        ("<tool_call>", "<tool_call>\nnothing"),
        ("<tool_call>", '<tool_call>\n{"name": "f"}\n</tool_call> and more'),
        ("<tool_call>", '<tool_call>\n{"name": 3, "arguments": {}}\n</tool_call>'),
        ("<tool_call>", '<tool_call>\n{"name": "\\ud800", "arguments": {}}\n</tool_call>'),
        ("<tool_call>", '<tool_call>\n{"name": "f", "arguments": "x"}\n</tool_call>'),
        ("<tool_call>\n<function=", "<tool_call>\n<function=a b>\n</function>\n</tool_call>"),
        ("<|tool_call>", "<|tool_call>call:f g{}<tool_call|>"),
        ("[ARGS]", "[TOOL_CALLS]what is this[ARGS]{}"),
        ("[TOOL_CALLS]", '[TOOL_CALLS] [{"name": "f"}]'),
        ('"parameters": {', '{"name": "Bob", "age": {"years": 3}}'),
        ('"parameters": {', '<|python_tag|>brave_search.call(query="x")'),
        ("functions.", "<|channel|>commentary to=functions.f<|message|>no JSON"),
        (KIMI, "<|tool_calls_section_begin|>nothing"),
        (KIMI, f"<|tool_call_begin|>call_7{KIMI}{{}}<|tool_call_end|>"),
        (KIMI, f"<|tool_call_begin|>functions.f:0{KIMI}[1]<|tool_call_end|>"),
        (KIMI, "the id functions.get_weather:0 names a function"),
        (MINIMAX, '<minimax:tool_call>\n<invoke name="a b">\n</invoke>\n</minimax:tool_call>'),
        (MINIMAX, "<minimax:tool_call> is a mark"),
    ],
)
def test_what_is_no_call_is_said(sign: str, text: str) -> None:
    [format] = [each for each in FORMATS if each.sign == sign]
    assert read_any_way(format, text) == ("", text, [])


def test_arguments_come_as_they_are_written() -> None:
    answer = AnswerParser(HERMES, TOOLS, None)
    assert not answer.push('<tool_call>\n{"name": "f", "argum', last=False).calls
    [begun] = answer.push('ents": {"a": "x', last=False).calls
    assert (begun.name, begun.arguments) == ("f", '{"a": "x')
    [more] = answer.push('y", ', last=False).calls
    assert (more.name, more.arguments) == ("", 'y"')
    assert not answer.push('"b": 1', last=False).calls
    [more] = answer.push("}", last=False).calls
    assert (more.name, more.arguments) == ("", ', "b": 1}')


def test_values_as_python_writes_them() -> None:
    [format] = [each for each in FORMATS if each.name == "qwen3_coder"]
    for written, value in (("True", "true"), ("None", "null"), ("NaN", '"NaN"')):
        text = f"<tool_call>\n<function=f>\n<parameter=tags>\n{written}\n</parameter>\n</function>"
        tools = [Tool("f", {"properties": {"tags": {"type": "array"}}})]
        assert read_any_way(format, text, tools=tools)[2] == [("f", f'{{"tags": {value}}}')]


def test_deep_nesting_is_no_call() -> None:
    [format] = [each for each in FORMATS if each.name == "gemma4"]
    _, said, [(name, _)] = read_any_way(format, "<|tool_call>call:f{a:" + "[" * 3000)
    assert name == "f"
    assert said.startswith("[")


def test_thoughts_are_told_from_what_is_said() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    for text, expected in (
        (f"<think>\nHm, {call}?\n</think>\n\nHi.\n{call}", (f"Hm, {call}?", "Hi.", [("f", "{}")])),
        ("<think>\n\n</think>\n\nHi \n", ("", "Hi \n", [])),
        ("<think>cut o", ("cut o", "", [])),
        ("<thin", ("", "<thin", [])),
        (" Hi <think>no</think>", ("", " Hi <think>no</think>", [])),
    ):
        assert read_any_way(HERMES, text, reasoning_tags=THINK) == expected
    opened = read_any_way(HERMES, "Hm\n</think>\n\nHi", reasoning_tags=THINK, thinking=True)
    assert opened == ("Hm", "Hi", [])
    said = "<|start|>assistant<|channel|>final<|message|>It is <|1|> é."
    to = "to=f<|channel|>commentary <|constrain|>json<|message|>{}"  # of no tool that there is
    for text, expected in (
        (f"<|channel|>analysis<|message|>A < b.<|end|>{said}", ("A < b.", "It is <|1|> é.")),
        ("no markers at all, a < b", ("", "no markers at all, a < b")),
        ("<|channel|>final<|message|>Hi", ("", "Hi")),
        (f"<|channel|>analysis<|message|>Hm<|end|><|start|> {to}", ("Hm", f"<|start|> {to}")),
        ("<|channel|>commentary<|message|>First this.", ("", "First this.")),
        ("<|channel|>analysis<|message|>cut off <|en", ("cut off <|en", "")),
        (f" {to}", ("", f" {to}")),
        ("", ("", "")),
    ):
        assert read_any_way(HARMONY, text, tools=[]) == (*expected, [])
    gemma = "<|channel>thought\nHm\n<channel|>Hi"
    assert read_any_way(None, gemma, reasoning_tags=REASONING_TAGS[2]) == ("Hm", "Hi", [])


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
    assert required_tools(TOOLS, "auto") == required_tools([], "none") == []
    assert required_tools(TOOLS, "required") == TOOLS
    named = {"type": "function", "function": {"name": "get_weather"}}
    assert required_tools(TOOLS, named) == TOOLS[:1]
    for tools, choice in (
        (TOOLS, {"type": "function", "function": {"name": "other"}}),
        (TOOLS, {"function": {"name": "get_weather"}}),
        (TOOLS, "sometimes"),
        (TOOLS, None),
        ([], "required"),
        ([], named),
    ):
        with pytest.raises(RequestError, match="tool_choice"):
            required_tools(tools, choice)


def tokenizer_of(format: Format, *, special: bool) -> Tokenizer:
    alphabet = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({sign: at for at, sign in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    markers = (*format.markers, KIND, THINK.open, THINK.close)
    special = special or format.name == "openai"  # whose markers always are
    tokenizer.add_special_tokens(
        [AddedToken(each, special=True) for each in ("<eos>", *(markers if special else ()))]
    )
    return tokenizer


ENDS = {"<eos>", '<|"|>', *'"}]<|>'}


class Grammar:
    def __init__(self, format: Format, tools: Sequence[Tool], *, special: bool, **options: Any):
        self.tokenizer = tokenizer_of(format, special=special)
        eos = self.tokenizer.token_to_id("<eos>")
        self.tokens = LLTokenizer(self.tokenizer.to_str(), eos_token=eos)
        added = {t.content: at for at, t in self.tokenizer.get_added_tokens_decoder().items()}
        options = {"parallel": True, "thinking": False, "tags": None, **options}
        self.text = grammar(format, tools, added=added, **options)
        assert not LLMatcher.validate_grammar(self.text, self.tokens)

    def admits(self, text: str) -> bool:
        matcher = LLMatcher(self.tokens, self.text)
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    def random_text(self, rng: random.Random, most: int = 3000) -> str | None:
        """Walk along what it admits, mostly straight on; None if it does not end."""
        matcher, ids = LLMatcher(self.tokens, self.text), list[int]()
        for _ in range(most):
            packed = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            mask = np.unpackbits(packed, bitorder="little")
            allowed = np.flatnonzero(mask[: self.tokenizer.get_vocab_size()]).tolist()
            ends = [token for token in allowed if self.tokenizer.id_to_token(token) in ENDS]
            token = rng.choice(ends if ends and rng.random() < 0.3 else allowed)
            if self.tokenizer.id_to_token(token) == "<eos>":
                return self.tokenizer.decode(ids, skip_special_tokens=False)
            assert matcher.consume_token(token)
            ids.append(token)
        return None


PROPERTIES = {
    "a": {"type": "string"},
    "b": {"type": "integer"},
    "c": {"enum": ["x", "y"]},
    "d": {"type": "array", "items": {"type": "boolean"}},
}
PARAMETERS = {"properties": PROPERTIES, "required": ["b"], "additionalProperties": False}
FUNCTIONS = [{"name": "f", "parameters": PARAMETERS}, {"name": "g"}]
SMALL = parse_tools([{"type": "function", "function": each} for each in FUNCTIONS])


@every
@pytest.mark.parametrize("special", [True, False])
def test_a_grammar_admits_what_templates_write(
    format: Format, special: bool, write: Callable[..., str]
) -> None:
    calls = Grammar(format, TOOLS, special=special)
    for text, written, content in list(random_outputs(format, write))[:30]:
        if format.name == "openai":  # its template writes the recipient in another place
            [(name, arguments)] = written
            text = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
            text += json.dumps(arguments, ensure_ascii=False)
        text = text.strip().replace(', "id": "call00000"}', "}")
        fits = not content and ', "id":' not in text and "e+" not in text
        if format.name == "gemma4":
            fits = fits and "None" not in text and "near:" not in text  # the template sorts keys
        if format.name == "qwen3_coder":
            fits = fits and "True" not in text and "False" not in text  # Python's words
        assert calls.admits(text) or not fits, text
        assert not calls.admits(text + "x")
        assert not calls.admits(f"Well, {text}")


@every
@pytest.mark.parametrize("special", [True, False])
def test_what_a_grammar_admits_is_read(format: Format, special: bool) -> None:
    schemas = {tool.name: tool.schema for tool in SMALL}
    calls, ended = Grammar(format, SMALL, special=special), 0
    for seed in range(20):
        text = calls.random_text(random.Random(seed))
        if text is None:
            continue
        ended += 1
        _, said, found = read(format, [text], SMALL)
        assert (said, bool(found)) == ("", True), text
        for name, arguments in found:
            jsonschema.validate(json.loads(arguments, strict=False), schemas[name])
    assert ended >= 10


@every
def test_a_grammar_wants_one_call_of_the_tool_named(
    format: Format, write: Callable[..., str]
) -> None:
    named = required_tools(TOOLS, {"type": "function", "function": {"name": "get-time.now"}})
    one = Grammar(format, named, special=False, parallel=False)
    text = write(format, [("get-time.now", {})], "").strip()
    if format.name == "openai":
        text = "<|channel|>commentary to=functions.get-time.now <|constrain|>json<|message|>{}"
    if '"id"' in text:
        text = '[TOOL_CALLS] [{"name": "get-time.now", "arguments": {}}]'
    assert one.admits(text)
    assert not one.admits("")
    assert not one.admits(text + text)
    assert not one.admits(text.replace("get-time.now", "get_weather"))


@pytest.mark.parametrize("special", [True, False])
def test_a_grammar_lets_the_model_think_first(special: bool) -> None:
    call = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
    thinks = Grammar(HERMES, SMALL, special=special, tags=THINK)
    assert thinks.admits(call)
    assert thinks.admits(f"<think>\nHm\n</think>\n\n{call}")
    assert not thinks.admits("<think>\nHm\n</think>\n\n")
    opened = Grammar(HERMES, SMALL, special=special, tags=THINK, thinking=True)
    assert opened.admits(f"Hm\n</think>\n\n{call}")
    assert not opened.admits(call)


@pytest.mark.parametrize("special", [True, False])
def test_a_grammar_begins_where_a_message_ends(special: bool) -> None:
    call = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
    options: dict[str, Any] = {"special": special, "tags": THINK, "is_begun": True}
    in_text = Grammar(HERMES, SMALL, **options)
    assert in_text.admits(call)
    assert not in_text.admits(f"<think>\nHm\n</think>\n\n{call}")
    in_thought = Grammar(HERMES, SMALL, **options, thinking=True)
    assert in_thought.admits(f" so\n</think>\n\n{call}")
    number = Grammar(HERMES, [], **options, answer={"type": "integer"})
    assert number.admits("12")
    assert not number.admits("<think></think>12")


def test_a_grammar_of_channels_begins_where_a_message_ends() -> None:
    call = "<|channel|>commentary to=functions.g <|constrain|>json<|message|>{}"
    then = "<|end|><|start|>assistant"
    thought = f"<|channel|>analysis<|message|>Hm{then}"
    options: dict[str, Any] = {"special": True, "is_begun": True}
    in_text = Grammar(HARMONY, SMALL, **options)
    assert in_text.admits(f"{then}{call}")
    assert in_text.admits(f"{then}{thought}{call}")
    assert not in_text.admits(call)
    in_thought = Grammar(HARMONY, SMALL, **options, thinking=True)
    assert in_thought.admits(f" so{then}{call}")
    assert not in_thought.admits(call)
    schema = {"type": "integer"}
    either = Grammar(HARMONY, SMALL, **options, answer=schema)
    assert either.admits("12")
    assert either.admits(f"{then}{call}")
    after = Grammar(HARMONY, [], **options, thinking=True, answer=schema)
    assert after.admits(f" so{then}<|channel|>final<|message|>12")
    assert not after.admits("12")


@every
@pytest.mark.parametrize("special", [True, False])
def test_an_answer_is_calls_or_what_was_asked_of_it(
    format: Format, special: bool, write: Callable[..., str]
) -> None:
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    final = "<|channel|>final<|message|>" if format.name == "openai" else ""
    either = Grammar(format, TOOLS, special=special, answer=schema)
    alone = Grammar(format, [], special=special, answer=schema)
    for answers in (either, alone):
        assert answers.admits(final + '{"age": 3}')
        assert not answers.admits(final + '{"age": "3"}')
    text = write(format, [("get-time.now", {})], "").strip().replace(', "id": "call00000"}', "}")
    if format.name == "openai":
        text = "<|channel|>commentary to=functions.get-time.now <|constrain|>json<|message|>{}"
    assert either.admits(text)
    assert not alone.admits(text)


@pytest.mark.parametrize("name", ["gemma4", "qwen3_coder", "minimax_m2"])
def test_beside_an_answer_arguments_that_cannot_be_enforced_are_free(name: str) -> None:
    [format] = [each for each in FORMATS if each.name == name]
    parameters = {"properties": {"a": {"type": "string", "pattern": "x+"}}}
    tools = parse_tools([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    either = Grammar(format, tools, special=False, answer={"const": "yes"})
    assert either.admits('"yes"')
    calls = {
        "gemma4": '<|tool_call>call:f{a:<|"|>y<|"|>}<tool_call|>',
        "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\ny\n</parameter>\n</function>\n"
        "</tool_call>",
        "minimax_m2": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">y</parameter>\n'
        "</invoke>\n</minimax:tool_call>",
    }
    assert either.admits(calls[name])


@pytest.mark.parametrize("name", ["gemma4", "qwen3_coder", "minimax_m2"])
def test_what_a_format_cannot_enforce_is_refused(name: str) -> None:
    [format] = [each for each in FORMATS if each.name == name]
    for schema, said in (
        ({"a": {"type": "string", "pattern": "x+"}}, "pattern"),
        ({"a": 3}, "not valid|cannot be enforced"),
        ([3], "not valid"),
    ):
        function = {"name": "f", "parameters": {"properties": schema}}
        tools = parse_tools([{"type": "function", "function": function}])
        with pytest.raises(RequestError, match=said):
            grammar(format, tools, None, {}, parallel=True, thinking=False)


@every
def test_a_template_tells_the_format(format: Format) -> None:
    dialect = dialect_of(renderer(WRITING[format.sign]), {})
    assert dialect.format is format
    assert dialect.shows_tools
    assert dialect.named_ids == dialect.typescript == (format.name == "kimi_k2")

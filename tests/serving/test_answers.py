"""What a choice looks like in OpenAI's API, whole and in pieces; no server."""

from itertools import pairwise
from typing import Any

import pytest

from dflash_trt.chat import HARMONY, AnswerParser, ContentDelta, parse_tools
from dflash_trt.chat.formats import HERMES, REASONING_TAGS, Format
from dflash_trt.serving.answer import Chunk
from dflash_trt.serving.http.answers import ChatReader, ChoiceWriter
from dflash_trt.serving.http.logprobs import ContentLogprobs

TOOLS = parse_tools([{"type": "function", "function": {"name": name}} for name in ("f", "g")])
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
CALLS = CALL + CALL.replace('"f"', '"g"')
KINDS = ("role", "reasoning_content", "content", "name", "arguments", "finish_reason")


def chunk(text: str, reason: str = "", **values: Any) -> Chunk:
    return Chunk(text, finish_reason=reason, prompt_tokens=1, completion_tokens=1, **values)


def chat_reader(form: Format = HERMES, **options: Any) -> ChatReader:
    def parser(thinking: bool) -> AnswerParser:
        return AnswerParser(form, TOOLS, REASONING_TAGS[0], thinking=thinking)

    return ChatReader(parser, **options)


def chat_writer(*, stream: bool, drafting: bool = False, **options: Any) -> ChoiceWriter:
    return ChoiceWriter(lambda _: b"", False, stream, chat_reader(**options), drafting=drafting)


def kinds(piece: dict[str, Any]) -> list[str]:
    delta = piece["delta"]
    [function] = [call["function"] for call in delta.get("tool_calls", [])] or [{}]
    found = {**delta, **{k: v for k, v in function.items() if v}, **piece}
    return [kind for kind in KINDS if found.get(kind)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hi", "role content finish_reason"),
        ("", "role finish_reason"),
        ("<think>\nHm.\n</think>\n\nWell.", "role reasoning_content content finish_reason"),
        ("<think>Hm.</think>" + CALL, "role reasoning_content name arguments finish_reason"),
        ("Sure." + CALLS, "role content name arguments name arguments finish_reason"),
    ],
)
def test_a_piece_has_one_kind_of_news(text: str, expected: str) -> None:
    for size in (len(text) or 1, 7, 1):
        writer, found = chat_writer(stream=True), list[str]()
        pieces = [text[at : at + size] for at in range(0, len(text), size)] or [""]
        for at, piece in enumerate(pieces):
            for written in writer.write(chunk(piece, "stop" if at == len(pieces) - 1 else "")):
                [kind] = kinds(written)
                found += [] if found[-1:] == [kind] else [kind]
        assert found == expected.split()


HARMONY_CALLS = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Sure."
    "<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
    '{"a": 1}<|call|><|start|>assistant<|channel|>commentary to=functions.g '
    '<|constrain|>json<|message|>{"a": 1}<|call|>'
)


@pytest.mark.parametrize(
    ("form", "text"),
    [(HERMES, f"<think>\nHm.\n</think>\n\nSure.\n{CALLS}"), (HARMONY, HARMONY_CALLS)],
    ids=["hermes", "harmony"],
)
@pytest.mark.parametrize("size", [1, 2, 5, 8, 16, 1000])
def test_a_step_may_span_the_end_of_a_call_and_what_follows(
    form: Format, text: str, size: int
) -> None:
    """vllm 55284, PR 53638, 41967 lost the first call's arguments or showed a marker.

    vllm 30204, PR 26291, TensorRT-LLM 9256 did so with words where channels change.
    """
    for first in range(len(text)):
        writer = chat_writer(stream=True, form=form)
        cut = [0, *range(first or size, len(text), size), len(text)]
        steps = [text[start:end] for start, end in pairwise(cut)]
        told = {"reasoning_content": "", "content": ""}
        calls = list[list[str]]()
        for at, step in enumerate(steps):
            for piece in writer.write(chunk(step, "stop" if at == len(steps) - 1 else "")):
                for kind in told:
                    told[kind] += piece["delta"].get(kind) or ""
                for call in piece["delta"].get("tool_calls", []):
                    function = call["function"]
                    calls += [[function["name"], ""]] if "name" in function else []
                    assert call["index"] == len(calls) - 1
                    calls[-1][1] += function["arguments"]
        assert told == {"reasoning_content": "Hm.", "content": "Sure."}
        assert calls == [["f", '{"a": 1}'], ["g", '{"a": 1}']]


def test_logprobs_and_rounds_come_with_the_last_news_and_once() -> None:
    told: dict[str, Any] = {"logprobs": [-0.5], "token_ids": [3], "drafting": [{"round": 0}]}
    for text in ("<think>a</think>b", ""):
        pieces = chat_writer(stream=True, drafting=True).write(chunk(text, "stop", **told))
        assert [bool(piece["logprobs"]) for piece in pieces][-2:] == [True, False]
        assert [piece["drafting"]["rounds"] for piece in pieces][-2:] == [told["drafting"], []]
        assert sum(bool(piece["logprobs"]) for piece in pieces) == 1


def test_a_text_ends_in_a_piece_of_its_own() -> None:
    first, last = ChoiceWriter(lambda _: b"", False, True).write(chunk("a", "length"))
    assert (first["text"], first["finish_reason"]) == ("a", None)
    assert (last["text"], last["finish_reason"]) == ("", "length")


@pytest.mark.parametrize("cut", range(1, len(CALL)))
def test_an_enforced_call_that_is_cut_is_no_content(cut: int) -> None:
    for stream in (False, True):
        for piece in chat_writer(stream=stream, only_calls=True).write(chunk(CALL[:cut], "length")):
            assert not piece["delta" if stream else "message"].get("content")
    [choice] = chat_writer(stream=False).write(chunk(CALL[:9], "length"))
    assert choice["message"]["content"] == CALL[:9], "what nobody asked to be a call is text"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"token_ids": [5]}, None),
        ({"stop_word": "END"}, "END"),
        ({"token_ids": [5, 7]}, 7),
        ({"token_ids": [5, 7], "reason": "length"}, None),
    ],
)
def test_what_ended_a_text_is_told(values: dict[str, Any], expected: str | int | None) -> None:
    writer = ChoiceWriter(lambda _: b"", False, False, stop_ids=[7])
    [choice] = writer.write(chunk("a", **{"reason": "stop", **values}))
    assert choice["stop_reason"] == expected


SPELLED = [b"a", *(bytes([byte]) for byte in "🙂".encode()), b" und", b"\xc3", b"\xa9"]


@pytest.mark.parametrize("pieces", [[8], [1] * 8, [3, 5]])
def test_offsets_and_the_sampled_token_of_completions(pieces: list[int]) -> None:
    """A character of several tokens counts once; the sampled token is among the best."""
    writer = ChoiceWriter(SPELLED.__getitem__, False, True)
    offsets, start = list[int](), 0
    for count in pieces:
        ids = list(range(start, start + count))
        scores = {"logprobs": [-2.0] * count, "top_logprobs": [[-1.0]] * count}
        [piece] = writer.write(chunk("x", token_ids=ids, top_token_ids=[[0]] * count, **scores))
        logprobs, start = piece["logprobs"], start + count
        offsets += logprobs["text_offset"]
        for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
            assert top == ({"a": -1.0} if token == "a" else {token: -2.0, "a": -1.0})
    assert offsets == [0, 1, 1, 1, 1, 2, 6, 6]


@pytest.mark.parametrize("pieces", [[6], [2, 4], [4, 2], [1] * 6])
@pytest.mark.parametrize(
    ("prompt", "offsets"),
    [
        ("a<s> word", [0, 0, 1, 4, 9, 9]),  # the first `<s>` is added, and the second one sent
        ("<s> a<s> word", [0, 3, 5, 8, 13, 13]),
    ],
)
def test_offsets_of_an_echoed_prompt(prompt: str, offsets: list[int], pieces: list[int]) -> None:
    """A special token counts where the prompt shows it; a dropped space does not."""
    spelled, tokens = [b"<s>", b" a", b" word", b" end"], [0, 1, 0, 2, 0, 3]
    writer = ChoiceWriter(spelled.__getitem__, True, True, hidden={0})
    given = list[int]()
    for count in pieces:
        ids = tokens[len(given) : len(given) + count]
        text = prompt if not given else ""
        new = Chunk(text, token_ids=ids, logprobs=[-1.0] * count, prompt_tokens=4)
        [piece] = writer.write(new)
        given += piece["logprobs"]["text_offset"]
    assert given == offsets


# --- log-probabilities of the content alone, as `/v1/responses` has them --------------------------

PIECES = [" I", " am", "\u00e9", "<think>", " Hm", ".", "</think>", "\n\n", "<|end|>", "!", " "]
# a character in two tokens
EMOJI = "\U0001f642".encode()
WORDS: dict[int, bytes] = dict(enumerate(piece.encode() for piece in PIECES))
WORDS |= {
    100: EMOJI[:2],
    101: EMOJI[2:],
    **{200 + n: bytes([c]) for n, c in enumerate(CALL.encode())},
}
HIDDEN = {8}  # <|end|>
CALLED = [200 + n for n in range(len(CALL))]


def content_of(tokens: list[int], sizes: list[int], *, drops_space: bool = False) -> Any:
    """Return (content, tokens with log-probabilities of it) of rounds of so many tokens."""
    reader = chat_reader()
    logprobs = ContentLogprobs(WORDS.__getitem__, HIDDEN)
    content, entries, start, given = "", list[str](), 0, 0
    for at, size in enumerate(sizes):
        new_tokens = tokens[start : start + size]
        start += size
        last = at == len(sizes) - 1
        whole = b"".join(WORDS[token] for token in tokens[:start] if token not in HIDDEN)
        text = whole.decode(errors="ignore")
        text = text.removeprefix(" ") if drops_space else text
        scores = {"token_ids": new_tokens, "logprobs": [-0.5] * size}
        new = chunk(text[given:], "stop" if last else "", **scores)
        given = len(text)
        logprobs.add(new)
        news = reader.read(new)
        content += news.content
        entries += [
            bytes(entry["bytes"]).decode(errors="replace")
            for part in news.parts
            if isinstance(part, ContentDelta)
            for entry in logprobs.of(part.spans)
        ]
    return content, entries


@pytest.mark.parametrize(
    ("tokens", "content", "expected"),
    [
        ([0, 1, 9], " I am!", [" I", " am", "!"]),
        ([3, 4, 5, 6, 7, 0, 1, 8], "I am", [" I", " am"]),
        ([3, 4, 5, 6, 7, 100, 101, 9, 8], "\U0001f642!", ["\ufffd", "\ufffd\ufffd", "!"]),
        ([3, 4, 6, 0, *CALLED, 8], "I", [" I"]),
        ([0, *CALLED, *CALLED, 8], " I", [" I"]),
        ([3, 4, 6, *CALLED, 8], "", []),
        ([0, 10, 10, 1, 8], " I   am", [" I", " ", " ", " am"]),
    ],
    ids=["plain", "thought", "parts of a character", "a call", "two calls", "no text", "spaces"],
)
@pytest.mark.parametrize("step", [1, 2, 3, 1000])
def test_log_probabilities_are_those_of_the_content(
    tokens: list[int], content: str, expected: list[str], step: int
) -> None:
    sizes = [len(tokens[at : at + step]) for at in range(0, len(tokens), step)]
    assert content_of(tokens, sizes) == (content, expected)


def test_a_dropped_first_space_moves_nothing() -> None:
    tokens = [0, 1, *CALLED, 8]
    assert content_of(tokens, [1] * len(tokens), drops_space=True) == ("I am", [" I", " am"])

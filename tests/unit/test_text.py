"""The pieces add up to the text of all tokens, split no character, and end at a stop word."""

import random
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from dflash_trt.chat import ChatModel, has_channels
from dflash_trt.chat.formats.harmony import MARKERS
from dflash_trt.checkpoints import speller
from dflash_trt.config.build import Speculation
from dflash_trt.decoding import Request, SequenceState
from dflash_trt.serving.model.output_processor import (
    HOLE,
    Detokenizer,
    OutputProcessor,
    Prefix,
    StopWords,
)
from dflash_trt.serving.model.requests import parse_request
from dflash_trt.wire import Settings
from tests.support.request_tools import as_tensors
from tests.support.tool_templates import CHATML, renderer
from tests.unit.test_matcher import byte_level, sentencepiece

TEXT = "naïve 🙂🙃 — žluťoučký kůň, 日本語 và tiếng Việt; ok\n\tdef f(x):  return x  "


def llama2() -> Tokenizer:
    """Return a tokenizer with byte fallback whose first piece loses its leading space."""
    tokenizer = sentencepiece()
    tokenizer.normalizer = normalizers.Sequence([])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence([tokenizer.decoder, decoders.Strip(" ", 1, 0)])
    return tokenizer


def _pieces(tokenizer: Tokenizer, ids: list[int], draw: random.Random) -> list[str]:
    tokens = tokenizer.get_added_tokens_decoder()
    special = frozenset(token for token, each in tokens.items() if each.special)
    detokenizer, pieces, at = Detokenizer(tokenizer, special), [], 0
    while at < len(ids):
        step = draw.randint(1, 5)
        pieces.append(detokenizer.push(ids[at : at + step], last=at + step >= len(ids)))
        at += step
    return pieces


@pytest.mark.parametrize("make", [byte_level, llama2])
@pytest.mark.parametrize("seed", range(20))
def test_text_comes_in_whole_characters(make, seed: int) -> None:
    tokenizer = make()
    ids = tokenizer.encode(TEXT).ids
    pieces = _pieces(tokenizer, ids, random.Random(seed))
    assert "".join(pieces) == tokenizer.decode(ids)
    assert HOLE not in "".join(pieces)


@pytest.mark.parametrize("seed", range(20))
def test_any_bytes_give_what_decoding_all_at_once_gives(seed: int) -> None:
    tokenizer, draw = byte_level(), random.Random(seed)
    ids = [draw.randrange(tokenizer.get_vocab_size()) for _ in range(300)]
    assert "".join(_pieces(tokenizer, ids, draw)) == tokenizer.decode(ids)


def test_an_unfinished_character_comes_at_the_end() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("a🙂").ids
    detokenizer = Detokenizer(tokenizer, frozenset())
    assert detokenizer.push(ids[:3]) == "a"
    assert detokenizer.push([], last=True) == HOLE


def test_hidden_tokens_are_no_text() -> None:
    tokenizer = byte_level()
    end = tokenizer.token_to_id("<|end|>")
    ids = [*tokenizer.encode("é").ids, end]
    assert Detokenizer(tokenizer, frozenset({end})).push(ids, last=True) == "é"


def test_markers_of_channels_are_text_and_the_end_is_not() -> None:
    """Chats of gpt-oss tell channels apart by these markers."""
    tokenizer, answer = byte_level(), f"{''.join(MARKERS)}It is <|1|> é."
    assert not has_channels(tokenizer)
    tokenizer.add_special_tokens([*MARKERS, "<|return|>"])
    end = tokenizer.token_to_id("<|return|>")
    for stop_words in ((), ("never",)):
        sequence = SequenceState(Request([1], max_tokens=999, stop_ids=frozenset({end})))
        choice, text = OutputProcessor(0, sequence, 0.0, tokenizer, stop_words, Prefix()), ""
        for token in tokenizer.encode(f"{answer}<|return|>").ids:
            sequence.commit([token])
            news = choice.new_chunk(final_only=False)
            text += news.text if news else ""
        assert (sequence.finish_reason, text) == ("stop", answer)


def gemma() -> Tokenizer:
    """Return one whose decoder drops nothing, and where runs of spaces are added tokens."""
    tokenizer = sentencepiece()
    tokenizer.add_tokens(["▁▁", "▁▁▁"])
    return tokenizer


def metaspace(scheme: str) -> Tokenizer:
    """Return one whose decoder drops the spaces of a text's first token, unless `never`."""
    tokenizer = sentencepiece()
    tokenizer.normalizer = normalizers.Sequence([])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    steps = [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def word_pieces() -> Tokenizer:
    vocabulary = ["[UNK]", "a", "go", "##ing", "world", "."]
    model = models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="[UNK]")
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


DECODERS = {
    "byte level": byte_level,
    "llama 2, mistral": llama2,
    "gemma": gemma,
    "metaspace first": lambda: metaspace("first"),
    "metaspace always": lambda: metaspace("always"),
    "metaspace never": lambda: metaspace("never"),
    "word pieces": word_pieces,
}


def _units(tokenizer: Tokenizer) -> list[list[int]]:
    """Return tokens that are whole characters, and characters written as bytes."""
    spell = speller(tokenizer)
    tokens = range(tokenizer.get_vocab_size())
    units = [[token] for token in tokens if HOLE not in spell(token).decode(errors="replace")]
    spaces = [tokenizer.token_to_id(token) for token in ("▁", "▁▁", "Ġ")]
    units += [[token] for token in spaces if token is not None] * (len(units) // 4)
    written = [f"<0x{byte:02X}>" for byte in range(256)]
    if tokenizer.token_to_id(written[0]) is None:
        return units + [tokenizer.encode(character).ids for character in "é🙂 日"] * 20
    for character in "é🙂 日" * 20:
        units.append([tokenizer.token_to_id(written[byte]) for byte in character.encode()])
    return units


@pytest.mark.parametrize("kind", DECODERS)
def test_prompt_and_text_are_what_all_tokens_decode_to(kind: str) -> None:
    """A text goes on behind its prompt, wherever the prompt ends, and in any pieces."""
    tokenizer, draw = DECODERS[kind](), random.Random(kind)
    units = _units(tokenizer)
    for _ in range(5000):
        ids = [token for unit in draw.choices(units, k=draw.randint(1, 8)) for token in unit]
        at = draw.randint(0, len(ids))
        text = Detokenizer(tokenizer, frozenset()).push(ids[:at])
        detokenizer = Detokenizer(tokenizer, frozenset(), Prefix(text or "shown", ids[:at]))
        rest, step = ids[at:], draw.randint(1, 4)
        pieces = [detokenizer.push(rest[i : i + step]) for i in range(0, len(rest), step)]
        pieces.append(detokenizer.push([], last=True))
        assert HOLE not in "".join(pieces)
        assert text + "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=False), ids


@pytest.mark.parametrize("kind", DECODERS)
def test_any_tokens_give_one_text_however_they_come(kind: str) -> None:
    """Bytes that are no character, and one cut at the end, are the same in rounds of any size."""
    tokenizer, draw = DECODERS[kind](), random.Random(kind)
    for _ in range(5000):
        ids = [draw.randrange(tokenizer.get_vocab_size()) for _ in range(draw.randint(1, 12))]
        prefix = Prefix("", ids[: draw.randint(0, 4)])
        whole = Detokenizer(tokenizer, frozenset(), prefix).push(ids, last=True)
        detokenizer = Detokenizer(tokenizer, frozenset(), prefix)
        pieces, at = [], 0
        while at < len(ids):
            step = draw.randint(1, 5)
            pieces.append(detokenizer.push(ids[at : at + step]))
            at += step
        assert "".join(pieces) + detokenizer.push([], last=True) == whole


@pytest.mark.parametrize(
    ("prompt", "answer", "text"),
    [
        ([], ["▁", "t"], "t"),  # a text of its own
        (["<|end|>"], ["▁", "t"], "t"),  # nothing of the prompt is text
        (["a"], ["▁", "t"], " t"),
        (["a", "<|end|>"], ["▁", "t"], " t"),
        (["a"], ["t"], "t"),
        (["▁"], ["▁", "t"], " t"),  # the decoder dropped the prompt's space
        (["a", "<0xC3>"], ["<0xA9>", "t"], "ét"),
        (["a", "<0xC3>"], ["t"], "t"),  # what is missing is missing in the prompt
        (["a", "<0xC3>"], [], ""),
        (["a"], ["t", "<0xC3>"], f"t{HOLE}"),
    ],
)
def test_text_behind_a_prompt(prompt: list[str], answer: list[str], text: str) -> None:
    tokenizer = llama2()
    hidden = frozenset({tokenizer.token_to_id("<|end|>")})
    before = Prefix("", [tokenizer.token_to_id(token) for token in prompt])
    tokens = [tokenizer.token_to_id(token) for token in answer]
    assert Detokenizer(tokenizer, hidden, before).push(tokens, last=True) == text


SETTINGS = Settings(
    tokenizer="",
    engines="",
    mode="ensemble",
    eos_token_ids=frozenset({1}),
    slots=2,
    max_queue=1,
    max_seq_len=400,
    prefill_chunk=8,
    block_size=4,
    speculation=Speculation(draft_tokens=3),
)
HI = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "t"}]


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        ({"text_input": "a"}, " t"),
        ({"text_input": "a", "exclude_input_in_output": False}, "a t"),
        ({"input_ids": ["▁", "a"]}, " t"),
        ({"input_ids": ["▁", "a"], "exclude_input_in_output": False}, "a t"),
        ({"input_ids": ["a", "<0xC3>"], "exclude_input_in_output": False}, f"a{HOLE} t"),
        ({"messages": HI[:1]}, "t"),  # an answer is a text of its own
        ({"messages": HI[:1], "guided_choice": [" t"]}, " t"),
        (
            {"messages": HI, "continue_final_message": True, "add_generation_prompt": False},
            " t",
        ),
    ],
)
def test_where_a_text_begins(sent: dict[str, Any], text: str) -> None:
    tokenizer = llama2()
    chat = ChatModel(tokenizer, renderer(CHATML))
    if "input_ids" in sent:
        sent = {**sent, "input_ids": [*map(tokenizer.token_to_id, sent["input_ids"])]}
    fields = {"max_tokens": 2, **sent}
    parsed = parse_request(as_tensors(fields), tokenizer, chat, SETTINGS)
    sequence = SequenceState(parsed.choices[0])
    output = OutputProcessor(0, sequence, 0.0, tokenizer, (), parsed.prefix, parsed.hidden)
    sequence.commit([tokenizer.token_to_id("▁"), tokenizer.token_to_id("t")])
    chunk = output.new_chunk(final_only=True)
    assert chunk is not None
    assert chunk.text == text


def gated(pieces: list[str], words: list[str]) -> tuple[list[str], bool]:
    """Return the text piece by piece, and whether a stop word ended it."""
    stop, given = StopWords(words), []
    for piece in pieces:
        text, found = stop.push(piece)
        given.append(text)
        if found:
            return given, True
    return [*given, stop.held], False


@pytest.mark.parametrize("seed", range(200))
def test_any_text_in_any_pieces(seed: int) -> None:
    rng = np.random.default_rng(seed)
    text = "".join(rng.choice(list("aab"), 30))
    words = ["".join(rng.choice(list("ab"), rng.integers(1, 6))) for _ in range(rng.integers(1, 4))]
    cuts = sorted(rng.integers(0, 31, 8).tolist())
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, 30], strict=True)]
    given, found = gated(pieces, words)
    # the text that was there when the first stop word was complete
    first = next((n for n in range(31) if any(word in text[:n] for word in words)), None)
    assert found == (first is not None)
    if first is None:
        assert "".join(given) == text
    else:
        assert text.startswith("".join(given))
        assert not any(word in "".join(given) for word in words)
    if len(words) == 1:
        assert "".join(given) == text.split(words[0])[0]


def test_nothing_is_held_back_without_need() -> None:
    given, found = gated(["ab", "c", "xEN", "q", "E", "ND", "z"], ["END"])
    assert given == ["ab", "c", "x", "ENq", "", ""]
    assert found

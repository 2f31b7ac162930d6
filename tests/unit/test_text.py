"""The pieces add up to the text of all tokens, split no character, and end at a stop word."""

import random

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers

from dflash_trt.chat import has_channels
from dflash_trt.chat.formats.harmony import MARKERS
from dflash_trt.decoding import Request, SequenceState
from dflash_trt.serving.model.output_processor import (
    HOLE,
    Detokenizer,
    OutputProcessor,
    StopWords,
)
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
        choice, text = OutputProcessor(0, sequence, 0.0, tokenizer, stop_words, ""), ""
        for token in tokenizer.encode(f"{answer}<|return|>").ids:
            sequence.commit([token])
            news = choice.new_chunk(final_only=False)
            text += news.text if news else ""
        assert (sequence.finish_reason, text) == ("stop", answer)


def test_the_window_stays_short() -> None:
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer, frozenset())
    for _ in range(500):
        detokenizer.push(tokenizer.encode("ab é").ids)
    assert len(detokenizer._window) < 20


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

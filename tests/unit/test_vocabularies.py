"""Texts, echoes and grammars over published vocabularies, held against `splintr` and bytes."""

import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dflash_trt.checkpoints.tiktoken_files import SPELLED
from dflash_trt.decoding import Grammar, Grammars
from dflash_trt.decoding import grammar as decoding_grammar
from dflash_trt.decoding.grammar import Matcher
from dflash_trt.serving.model.output_processor import Detokenizer, Prefix
from tests.support.vocabularies import BYTE_LEVEL, VOCABULARIES, Real, published
from tests.unit.test_tiktoken_files import random_text

COUNT = int(os.environ.get("TEXT_COUNT", "5000"))
SMALL = ("llama2", "llama3")  # in `make test`
SCHEMAS = json.loads((Path(__file__).parents[1] / "samples" / "json_schemas.json").read_text())[:50]
STATES = 2  # of a schema's text whose masks are compared
TOKENS = 150  # that are looked at in each, allowed and not
LONGEST = 80  # tokens of a text by a schema
MARKS = ["<s>", "</s>", "<|im_end|>", "<think>", "[INST]", "<0x0A>"]
every = pytest.mark.parametrize(
    ("name", "count"),
    [
        *[pytest.param(name, 200, id=f"{name}-some") for name in SMALL],
        *[pytest.param(name, COUNT, id=name, marks=pytest.mark.models) for name in VOCABULARIES],
    ],
)


def spelled(real: Real, name: str, ids: list[int]) -> str:
    text = b"".join(real.pieces[token] for token in ids).decode(errors="replace")
    is_first = VOCABULARIES[name].dummy_space and ids and ids[0] not in real.special
    return text.removeprefix(" ") if is_first else text


def in_pieces(detokenizer: Detokenizer, ids: list[int], dice: random.Random) -> str:
    text = ""
    while ids:
        size = dice.choice([1, 1, 2, 5])
        text += detokenizer.push(ids[:size])
        ids = ids[size:]
    return text + detokenizer.push([], last=True)


@every
def test_pieces_of_random_tokens_join_to_the_text(name: str, count: int) -> None:
    real = published(name)
    dice = random.Random(name)
    tokens = sorted(real.pieces)
    for _ in range(count):
        ids = dice.choices(tokens, k=dice.randint(1, 16))
        text = in_pieces(Detokenizer(real.tokenizer, frozenset()), ids, dice)
        assert text == spelled(real, name, ids), ids
        shown = [token for token in ids if token not in real.special]
        hidden = in_pieces(Detokenizer(real.tokenizer, real.special), ids, dice)
        assert hidden == spelled(real, name, shown), ids


@every
def test_an_echoed_prompt_and_its_answer_are_the_text(name: str, count: int) -> None:
    """Wherever the prompt ends, in a character too; and first spaces stay where they were."""
    real = published(name)
    dice = random.Random(name)
    for _ in range(count // 5):
        text = random_text(dice, MARKS)
        ids = real.tokenizer.encode(text, add_special_tokens=False).ids
        whole = in_pieces(Detokenizer(real.tokenizer, frozenset()), ids, dice)
        if BYTE_LEVEL.get(name) is not None and not BYTE_LEVEL[name].nfc:
            assert whole == text
        for cut in {0, len(ids), *(dice.randint(0, len(ids)) for _ in range(2))}:
            before = Detokenizer(real.tokenizer, frozenset()).push(ids[:cut])
            after = Detokenizer(real.tokenizer, frozenset(), Prefix(before, ids[:cut]))
            assert before + in_pieces(after, ids[cut:], dice) == whole, (text, cut)


def letters() -> Tokenizer:
    """Return a tokenizer whose tokens are the bytes, which knows what a text may go on with."""
    vocab = {letter: byte for byte, letter in SPELLED.items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


@pytest.fixture(autouse=True)
def without_haste(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the first grammar of a vocabulary take its time, beside other tests too."""
    monkeypatch.setattr(decoding_grammar, "SECONDS", 120.0)


BYTES = Grammars(letters(), 257, [256])


def allowed(matcher: Matcher, path: list[int]) -> set[int]:
    mask = matcher.masks(path)[-1]
    if mask is None:
        return set()
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


@every
def test_a_mask_allows_the_tokens_that_a_schema_does(name: str, count: int) -> None:
    real = published(name)
    dice = random.Random(name)
    known = Grammars(real.tokenizer, max(real.pieces) + 1, [real.end])
    for sample in SCHEMAS if count == COUNT else SCHEMAS[::10]:
        grammar = Grammar("json_schema", json.dumps(sample["schema"]))
        compare_masks(real, known.matcher(grammar), BYTES.matcher(grammar), dice)
        if not VOCABULARIES[name].dummy_space:
            text = written(BYTES.matcher(grammar), dice)
            ids = real.tokenizer.encode(text, add_special_tokens=False).ids
            matcher = known.matcher(grammar)
            assert matcher.count_allowed([], ids) == len(ids), text


def compare_masks(real: Real, matcher: Matcher, by_bytes: Matcher, dice: random.Random) -> None:
    """Walk along what a grammar allows; at some places look at many tokens."""
    path: list[int] = []
    places = dice.sample(range(12), STATES)
    plain = sorted(real.pieces.keys() - real.special)
    while len(path) < LONGEST:
        options = allowed(matcher, path)
        text = [byte for token in path for byte in real.pieces[token]]
        assert (real.end in options) == (256 in allowed(by_bytes, text)), bytes(text)
        assert not options & (real.special - {real.end})
        going_on = sorted(options - {real.end})
        if len(path) in places:
            looked_at = dice.sample(going_on, min(TOKENS, len(going_on)))
            for token in [*looked_at, *dice.sample(plain, TOKENS)]:
                piece = [*real.pieces[token]]
                fits = by_bytes.count_allowed(text, piece) == len(piece)
                assert (token in options) == fits, (bytes(text), bytes(piece))
        if not going_on or (real.end in options and dice.random() < 0.3):
            return
        path.append(dice.choice(going_on))


def written(matcher: Matcher, dice: random.Random) -> str:
    """Return a text that a grammar allows, or the beginning of one, of whole characters."""
    path: list[int] = []
    while len(path) < LONGEST:
        options = allowed(matcher, path)
        ascii = [byte for byte in options if byte < 128]
        if not ascii or (256 in options and dice.random() < 0.3):
            break
        ends = [byte for byte in ascii if chr(byte) in '"}]']
        path.append(dice.choice(ends if ends and dice.random() < 0.3 else ascii))
    return bytes(path).decode()

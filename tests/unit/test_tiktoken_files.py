"""Kimi's `tiktoken.model` as a tokenizer.json: the ids are tiktoken's, and no code runs.

The reference ids are those of Moonshot's own tokenizer (github.com/ml-rust/splintr, its tests).
"""

import base64
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from dflash_trt.checkpoints import (
    NO_DRAFTER,
    Model,
    Pair,
    copy_tokenizer,
    load_tokenizer,
    tokenizer_files,
)
from dflash_trt.checks.target import tokenizer
from dflash_trt.errors import CheckpointError
from tests.support.kimi import (
    PATTERN,
    RANKED,
    kimi_encoding,
    kimi_tokens,
    ranks_file,
    tokenizer_code,
    write_kimi_tokenizer,
)

FEW = 3000
COUNT = int(os.environ.get("TEXT_COUNT", "20000"))
SCRIPTS = [
    (0x20, 0x7E), (0xA0, 0x24F), (0x370, 0x52F), (0x590, 0x6FF), (0x900, 0x97F), (0xE00, 0xEFF),
    (0x1100, 0x11FF), (0x1200, 0x13FF), (0x1780, 0x17FF), (0x2000, 0x206F), (0x2190, 0x21FF),
    (0x300, 0x36F), (0x3000, 0x30FF), (0x3400, 0x9FFF), (0xAC00, 0xD7A3), (0xFF00, 0xFFEF),
    (0x1D400, 0x1D7FF), (0x1F300, 0x1FAFF), (0x20000, 0x2A6DF), (0, 0x1F), (0, 0xD7FF),
    (0xE000, 0x10FFFF),
]  # fmt: skip
SPACES = [" ", "\n", "\r\n", "\t", "\v", "\f", "\x85", "\xa0", "\u200b", "\u2028", "\u3000"]
WORDS = [
    "Hello",
    "don't",
    "I'LL",
    "'s",
    "'\u017f",
    "İ",
    "ǅ",
    "ʰ",
    "々",
    "1234",
    "\uff11\uff12\uff13",
    "½",
    "==",
]


def random_text(dice: random.Random, special: list[str]) -> str:
    pieces = []
    for _ in range(dice.randint(1, 20)):
        kind = dice.random()
        if kind < 0.15:
            pieces.append(dice.choice(SPACES) * dice.randint(1, 3))
        elif kind < 0.3:
            pieces.append(dice.choice(WORDS))
        elif kind < 0.45:
            mark = dice.choice(special)
            pieces.append(mark[: dice.choice([len(mark), dice.randint(1, len(mark))])])
        else:
            first, last = dice.choice(SCRIPTS)
            pieces += [chr(dice.randint(first, last)) for _ in range(dice.randint(1, 8))]
    return "".join(pieces)


def assert_as_tiktoken(tokenizer: Tokenizer, ranks: int, count: int) -> None:
    known = kimi_encoding(ranks)
    dice = random.Random(77)
    special = sorted(known.special_tokens_set)
    texts = [random_text(dice, special) for _ in range(count)]
    tokenizer.encode_special_tokens = True  # marks in a user's text stay text
    as_text = [encoded.ids for encoded in tokenizer.encode_batch(texts)]
    tokenizer.encode_special_tokens = False
    as_marks = [encoded.ids for encoded in tokenizer.encode_batch(texts)]
    for text, plain, marked in zip(texts, as_text, as_marks, strict=True):
        assert plain == known.encode(text, disallowed_special=()), text
        assert marked == known.encode(text, allowed_special="all"), text
        assert tokenizer.decode(plain, skip_special_tokens=False) == text
        assert tokenizer.decode(marked, skip_special_tokens=False) == text
        ids = [dice.randrange(known.n_vocab) for _ in range(8)]
        assert tokenizer.decode(ids, skip_special_tokens=False) == known.decode(ids)


def test_some_ranks_give_the_ids_of_tiktoken(tmp_path: Path) -> None:
    write_kimi_tokenizer(tmp_path, FEW)
    assert_as_tiktoken(load_tokenizer(tmp_path), FEW, 500)


@pytest.mark.models
def test_all_ranks_give_the_ids_of_tiktoken(tmp_path: Path) -> None:
    write_kimi_tokenizer(tmp_path)
    loaded = load_tokenizer(tmp_path)
    for text, ids in (
        ("Hello world", [19180, 2695]),
        ("中文English混合", [16717, 44372, 13935]),
        ("1234567890", [6694, 12972, 16242, 15]),
    ):
        assert loaded.encode(text).ids == ids
    assert_as_tiktoken(loaded, RANKED, COUNT)


def test_a_build_has_the_tokenizer_without_the_code(tmp_path: Path) -> None:
    write_kimi_tokenizer(tmp_path, FEW, chat_template="{{ messages }}")
    names = [file.name for file in tokenizer_files(tmp_path)]
    assert names == ["tiktoken.model", "tokenizer_config.json"]
    copy_tokenizer(tmp_path, tmp_path / "built")
    built = tmp_path / "built" / "tokenizer"
    assert {file.name for file in built.iterdir()} == {"tokenizer.json", "tokenizer_config.json"}
    settings = json.loads((built / "tokenizer_config.json").read_text())
    assert "auto_map" not in settings
    assert settings["chat_template"] == "{{ messages }}"
    ids = load_tokenizer(tmp_path).encode("Hello <|im_end|> 中文").ids
    assert load_tokenizer(built).encode("Hello <|im_end|> 中文").ids == ids
    assert AutoTokenizer.from_pretrained(built).encode("Hello <|im_end|> 中文") == ids
    copy_tokenizer(tmp_path, tmp_path / "again")
    for file in built.iterdir():
        again = tmp_path / "again" / "tokenizer" / file.name
        assert again.read_bytes() == file.read_bytes()


def lines_without(*ranks: int) -> bytes:
    tokens = {rank: text for rank, text in enumerate(kimi_tokens()[:FEW]) if rank not in ranks}
    return ranks_file(tokens)


WHOLE = ranks_file(dict(enumerate(kimi_tokens()[:FEW])))
TOKEN = base64.b64encode(b"one more token")
RANKS = {
    "cut in a line": (WHOLE[:-9], "line 3000 is no token|none of rank"),
    "cut after a line": (lines_without(FEW - 1), "begin at id 3000, and .* has 2999 tokens"),
    "half of it": (WHOLE[: len(WHOLE) // 2], "line .* is no token|has .* tokens"),
    "empty": (b"", "no token is the byte 0"),
    "a rank is missing": (lines_without(700), "none of rank 700"),
    "a byte is missing": (
        ranks_file({0: b"one more token", **dict(enumerate(kimi_tokens()[1:FEW], 1))}),
        "no token is the byte",
    ),
    "a rank is there twice": (WHOLE + TOKEN + b" 700\n", "has rank 700, which an earlier line has"),
    "a token is there twice": (
        WHOLE + base64.b64encode(kimi_tokens()[700]) + b" 3000\n",
        "has two ranks",
    ),
    "no base64": (b"!!! 0\n" + WHOLE, "line 1 is no token"),
    "no number": (WHOLE + TOKEN + b" x\n", "line 3001 is no token"),
    "a page": (b"<html>Not found</html>\n", "line 1 is no token"),
}


@pytest.mark.parametrize(("data", "problem"), RANKS.values(), ids=RANKS)
def test_wrong_ranks_are_named(tmp_path: Path, data: bytes, problem: str) -> None:
    write_kimi_tokenizer(tmp_path, FEW)
    (tmp_path / "tiktoken.model").write_bytes(data)
    with pytest.raises(CheckpointError, match=problem) as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in caught.value.problem


def settings_with(directory: Path, **values: Any) -> str:
    file = directory / "tokenizer_config.json"
    return json.dumps(json.loads(file.read_text()) | values)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"added_tokens_decoder": {}}, "names no special tokens"),
        ({"added_tokens_decoder": {"2999": {"content": "a"}}}, "begin at id 2999"),
        ({"added_tokens_decoder": {"3000": {"content": "a"}, "3300": {"content": "b"}}}, "id 3300"),
        ({"added_tokens_decoder": {"3000": {"content": "a"}, "3001": {"content": "a"}}}, "two ids"),
        ({"added_tokens_decoder": {"3000": {"content": ""}}}, "no id of a text"),
        ({"added_tokens_decoder": {"x": {"content": "a"}}}, "'x', which is no id"),
        ({"added_tokens_decoder": {"3000": {"content": "[BOS]"}, "03000": "b"}}, "3000 is there"),
        ({"eos_token": "[END]"}, r"eos_token '\[END\]' is none"),
        ({"auto_map": {}}, "auto_map names no Python file"),
        ({"auto_map": {"AutoTokenizer": "other/repository--code.Class"}}, "names no Python file"),
        ({"auto_map": {"AutoTokenizer": ["../code.Class", None]}}, "names no Python file"),
        ({"auto_map": {"AutoTokenizer": ["missing.Class", None]}}, "missing.py, which has"),
    ],
)
def test_wrong_settings_are_named(tmp_path: Path, values: dict[str, Any], problem: str) -> None:
    write_kimi_tokenizer(tmp_path, FEW)
    (tmp_path / "tokenizer_config.json").write_text(settings_with(tmp_path, **values))
    with pytest.raises(CheckpointError, match=problem):
        load_tokenizer(tmp_path)


def test_an_id_that_is_named_twice(tmp_path: Path) -> None:
    write_kimi_tokenizer(tmp_path, FEW)
    file = tmp_path / "tokenizer_config.json"
    twice = '"added_tokens_decoder": {"3000": {"content": "other"}, '
    file.write_text(file.read_text().replace('"added_tokens_decoder": {', twice))
    with pytest.raises(CheckpointError, match="the id 3000 is there twice"):
        load_tokenizer(tmp_path)


O200K = [r"\p{L}+", r"\p{N}{1,2}", r"\s+", r"[^\s\p{L}\p{N}]+"]
CODES = {
    "computed": (tokenizer_code().replace('"|".join([', '"|".join(x for x in ['), "pat_str is no"),
    "a function's": (tokenizer_code().replace('"|".join([', "pattern_of(["), "pat_str is no"),
    "set later": (tokenizer_code() + "\nTikTokenTokenizer.pat_str = other\n", "pat_str is no"),
    "added to": (tokenizer_code() + "\nTikTokenTokenizer.pat_str += other\n", "pat_str is no"),
    "another argument": (tokenizer_code().replace("=self.pat_str", "=OTHER"), "pat_str in line"),
    "a formatted text": (tokenizer_code().replace('r"""\\s+""",', 'f"""{x}""",'), "pat_str is no"),
    "missing": (tokenizer_code().replace("pat_str = ", "pattern = "), "it has no pat_str"),
    "other marks": (tokenizer_code().replace("= 256", "= count()"), "num_reserved_special_tokens"),
    "possessive": (tokenizer_code([r"\p{N}{1,3}+", *PATTERN]), "another pattern than Kimi's"),
    "an anchor": (tokenizer_code([r"\s+$", *PATTERN]), "another pattern than Kimi's"),
    "not whole": (tokenizer_code([r"\p{L}+"]), "leaves out some characters"),
    "not valid": (tokenizer_code([r"(\p{L}+", *PATTERN]), "no regular expression"),
    "no Python": ("class {", "it is not Python"),
}


@pytest.mark.parametrize(("code", "problem"), CODES.values(), ids=CODES)
def test_code_that_is_no_plain_pattern_is_refused(tmp_path: Path, code: str, problem: str) -> None:
    write_kimi_tokenizer(tmp_path, FEW)
    (tmp_path / "tokenization_kimi.py").write_text(code)
    with pytest.raises(CheckpointError, match=problem) as caught:
        load_tokenizer(tmp_path)
    assert "tokenization_kimi.py" in caught.value.problem


def test_a_plain_pattern_is_taken_however_it_is_written(tmp_path: Path) -> None:
    write_kimi_tokenizer(tmp_path, FEW)
    ids = load_tokenizer(tmp_path).encode("Hello 中文 1234").ids
    body = ",\n".join(f"r'''{part}'''" for part in PATTERN)
    for value in (
        f'"|".join([{body}])',
        f"[{body}]",
        f'"|".join(({body}))',
        repr("|".join(PATTERN)),
    ):
        code = f"class TikTokenTokenizer:\n    pat_str: str = {value}\n"
        (tmp_path / "tokenization_kimi.py").write_text(code)
        assert load_tokenizer(tmp_path).encode("Hello 中文 1234").ids == ids
    named = f"PARTS = [{body}]\nclass TikTokenTokenizer:\n    pat_str = '|'.join(PARTS)\n"
    (tmp_path / "tokenization_kimi.py").write_text(named)
    assert load_tokenizer(tmp_path).encode("Hello 中文 1234").ids == ids
    (tmp_path / "tokenization_kimi.py").write_text(tokenizer_code(O200K))
    pieces = load_tokenizer(tmp_path).pre_tokenizer.pre_tokenize_str("ab1234")
    assert [text for text, _ in pieces] == ["ab", "12", "34"]
    found = tokenizer(Pair(Model("target", tmp_path, {}), NO_DRAFTER)).result
    assert found == "warning"

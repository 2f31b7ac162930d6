"""Tokenizers of GGUF files against the models' own, and against transformers' reading."""

import os
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import splintr
from tokenizers import Regex, Tokenizer
from tokenizers import pre_tokenizers as splitters
from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

from dflash_trt.errors import CheckpointError
from dflash_trt.weights.gguf.header import Header, read_header
from dflash_trt.weights.gguf.tokenizer import read_tokenizer
from tests.support import gguf_vocabularies
from tests.support.vocabularies import published
from tests.unit.test_tiktoken_files import random_text

COUNT = int(os.environ.get("TEXT_COUNT", "5000"))
FEW = 200
SPACES = [" " * count for count in range(36)]
MARKS = [
    "<s>", "</s>", "<bos>", "<|im_end|>", "<|eot_id|>", "<|return|>", "<start_of_turn>", "<unk>",
    "[INST]", "<0x0A>", "\u2581", "\u2581\u2581", "  ", "\n\n",
]  # fmt: skip


class Case(NamedTuple):
    vocabulary: str
    model: str
    pre: str
    pattern: str | None = None  # of the model's tokenizer, where the vocabulary is another one's
    runs: bool = False
    architecture: str = "llama"
    by_transformers: bool = False  # the reference is its reading of the same file


CASES = (
    Case("llama2", "llama", "default", by_transformers=True),
    Case("mistral_v1", "llama", "default", by_transformers=True),
    Case("gemma2", "llama", "default", runs=True, architecture="gemma2"),
    Case("gemma3", "llama", "default", runs=True, architecture="gemma3"),
    Case("gemma4", "gemma4", "default", architecture="gemma4"),
    Case("gemma4", "gpt2", "gemma4", architecture="gemma4"),
    Case("gpt_oss", "gpt2", "gpt-4o"),
    Case("mistral_v3", "gpt2", "tekken"),
    Case("llama3", "gpt2", "llama-bpe"),
    Case("qwen3", "gpt2", "qwen2"),
    Case("qwen3", "gpt2", "qwen35", splintr.QWEN35_PATTERN),
)
QUICK = ("llama2",)


def own_tokenizer(case: Case, file: Path) -> Tokenizer:
    if case.by_transformers:
        return convert_gguf_tokenizer(*get_gguf_tokenizer(str(file))[:2])[0]
    tokenizer = published(case.vocabulary).tokenizer
    if case.pattern is None:
        return tokenizer
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    split = splitters.Split(Regex(case.pattern), "isolated")
    byte_level = splitters.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = splitters.Sequence([split, byte_level])
    return tokenizer


def sample_texts(name: str, count: int) -> list[str]:
    dice = random.Random(name)
    texts = [random_text(dice, MARKS) for _ in range(count)]
    return [*texts, *SPACES, *(f"a{spaces}b" for spaces in SPACES), "", "a", "\n" * 9]


@pytest.mark.parametrize(
    ("case", "count"),
    [
        *[
            pytest.param(case, FEW, id=f"{case.vocabulary}-some")
            for case in CASES
            if case.vocabulary in QUICK
        ],
        *[
            pytest.param(case, COUNT, id=f"{case.vocabulary}-{case.pre}", marks=pytest.mark.models)
            for case in CASES
        ],
    ],
)
def test_texts_are_the_tokens_of_the_models_own_tokenizer(
    tmp_path: Path, case: Case, count: int
) -> None:
    real = published(case.vocabulary)
    more = {"tokenizer.ggml.add_bos_token": False}
    if case.architecture.startswith("gemma"):
        more["tokenizer.ggml.add_space_prefix"] = False
    file = gguf_vocabularies.write(
        tmp_path / "v.gguf",
        real,
        case.model,
        case.pre,
        architecture=case.architecture,
        runs=case.runs,
        more=more,
    )
    tokenizer = read_tokenizer(read_header(file))
    own = own_tokenizer(case, file)
    assert tokenizer.get_vocab_size() == own.get_vocab_size()
    for text in sample_texts(case.pre, count):
        ids = own.encode(text).ids
        assert tokenizer.encode(text).ids == ids, text
        for skipped in (True, False):
            decoded = own.decode(ids, skip_special_tokens=skipped)
            assert tokenizer.decode(ids, skip_special_tokens=skipped) == decoded, text


@pytest.fixture(scope="module")
def llama2(tmp_path_factory: pytest.TempPathFactory) -> Header:
    file = tmp_path_factory.mktemp("llama2") / "v.gguf"
    more = {"tokenizer.ggml.bos_token_id": 1}
    return read_header(gguf_vocabularies.write(file, published("llama2"), "llama", more=more))


def with_values(header: Header, changed: dict[str, Any]) -> Header:
    """Return a header with other values in its vocabulary; None: without one."""
    values = header.values | {f"tokenizer.ggml.{name}": value for name, value in changed.items()}
    return header._replace(
        values={key: value for key, value in values.items() if value is not None}
    )


def test_scores_order_the_merges_where_ids_do_not(llama2: Header) -> None:
    """Ids turned around, with their scores: the same pieces."""
    tokenizer = read_tokenizer(llama2)
    lists = ("tokens", "scores", "token_type")
    changed = {name: llama2.values[f"tokenizer.ggml.{name}"][::-1] for name in lists}
    turned = read_tokenizer(with_values(llama2, {**changed, "bos_token_id": 31998}))
    for text in sample_texts("turned", FEW):
        assert turned.encode(text).tokens == tokenizer.encode(text).tokens, text


@pytest.mark.parametrize("adds_bos", [None, True, False])
@pytest.mark.parametrize("prefix", [None, True, False])
def test_a_text_begins_as_the_file_says(
    llama2: Header, adds_bos: bool | None, prefix: bool | None
) -> None:
    changed = {"add_bos_token": adds_bos, "add_space_prefix": prefix}
    tokenizer = read_tokenizer(with_values(llama2, changed))
    text = tokenizer.encode("the", add_special_tokens=False)
    assert text.tokens == (["the"] if prefix is False else ["\u2581the"])
    assert tokenizer.decode(text.ids) == "the"
    begun = tokenizer.encode("the")
    assert begun.tokens == [*([] if adds_bos is False else ["<s>"]), *text.tokens]
    assert tokenizer.decode(begun.ids) == "the"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces is True"),
    ({"add_eos_token": True}, "add_eos_token is True"),
    ({"add_sep_token": True}, "add_sep_token is True"),
    ({"precompiled_charsmap": [1, 2]}, "precompiled_charsmap is"),
    ({"suppress_tokens": [5]}, "suppress_tokens is"),
    ({"scores": [0.0]}, "scores has 1 values for 32000 tokens"),
    ({"scores": None}, "without tokenizer.ggml.scores"),
    ({"token_type": [1, 1]}, "token_type has 2 values"),
    ({"tokens": "abc"}, "tokens is no list of texts"),
    ({"bos_token_id": 32000}, "bos_token_id is 32000, but there are 32000 tokens"),
    ({"bos_token_id": None}, "there is no tokenizer.ggml.bos_token_id"),
    ({"add_space_prefix": "no"}, "add_space_prefix is 'no'"),
    ({"model": "bert"}, "tokenizer is 'bert'"),
    ({"model": "gpt2", "pre": "grok-2"}, "pre-tokenizer 'grok-2'"),
    ({"tokens": ["a"] * 32000}, "are there twice"),
]


@pytest.mark.parametrize(("changed", "message"), REFUSED)
def test_what_is_not_handled_is_refused_by_name(
    llama2: Header, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_tokenizer(with_values(llama2, changed))

"""Byte-level BPE tokenizers, by the name that llama.cpp gives to how a text is split."""

from typing import NamedTuple

from tokenizers import Regex, Tokenizer, decoders, models, normalizers
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

from dflash_trt.weights.gguf.vocabulary import Vocabulary

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
WORDS = (  # with the number of digits in one piece
    CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|" + SPACES
)
WORDS_WITH_MARKS = (
    CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + SPACES
)
CASED_WORDS = (  # with what a word may end with, twice, and the number of digits
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*%s"
    r"|\p{N}{1,%d}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + SPACES
)


class Family(NamedTuple):
    """Tokenizers that split a text alike."""

    names: tuple[str, ...]
    pattern: str | None  # None: GPT-2's
    digits: bool = False  # each digit is split off first
    nfc: bool = False
    whole_words: bool = False  # a word that is a token is it, whatever the merges make of it
    adds_bos: bool = False  # unless the file says otherwise


FAMILIES = (
    Family(("default", "gpt-2"), None),
    Family(("smollm", "starcoder", "refact", "codeshell"), None, digits=True),
    Family(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0"),
        WORDS % 3,
        whole_words=True,
        adds_bos=True,
    ),
    Family(("qwen2", "deepseek-r1-qwen", "megrez"), WORDS % 1, nfc=True),
    Family(("qwen35",), WORDS_WITH_MARKS, nfc=True),
    Family(("tekken",), CASED_WORDS % ("", "", 1), whole_words=True, adds_bos=True),
    Family(
        ("gpt-4o", "llama4", "kanana2"),
        CASED_WORDS % (f"{CONTRACTIONS}?", f"{CONTRACTIONS}?", 3),
        whole_words=True,
    ),
)
FAMILY_OF = {name: family for family in FAMILIES for name in family.names}


def byte_level_tokenizer(
    family: Family, vocabulary: Vocabulary, merges: list[tuple[str, str]]
) -> Tokenizer:
    """Assemble the tokenizer without its added tokens."""
    model = models.BPE(vocab=vocabulary.ids(), merges=merges, ignore_merges=family.whole_words)
    tokenizer = Tokenizer(model)
    if family.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = Sequence(_pre_tokenizers(family))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pre_tokenizers(family: Family) -> list[PreTokenizer]:
    if family.pattern is not None:
        words = Split(Regex(family.pattern), "isolated")
        return [words, ByteLevel(add_prefix_space=False, use_regex=False)]
    gpt2 = ByteLevel(add_prefix_space=False)
    return [Digits(individual_digits=True), gpt2] if family.digits else [gpt2]

"""Published vocabularies as tokenizer.json files, made at run time of what `splintr` carries.

Byte-level ones have merges by their tokens' order, as in tiktoken's files. Those of SentencePiece
have the pieces, and as merges every pair of pieces that is one, as transformers converts them.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import NamedTuple

import splintr
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers import pre_tokenizers as splitters

from dflash_trt.checkpoints.tiktoken_files import SPELLED, merges_of

SPACE = "\u2581"  # of SentencePiece


class Vocabulary(NamedTuple):
    """A published vocabulary; pattern: None for SentencePiece's."""

    pattern: str | None
    end: str  # a token that ends texts
    first: int = 0  # the id of the first token that is no special one
    nfc: bool = False
    dummy_space: bool = False  # a text begins with a space that decoding leaves out


BYTE_LEVEL = {
    "gpt_oss": Vocabulary(splintr.O200K_BASE_PATTERN, "<|return|>"),
    "llama3": Vocabulary(splintr.LLAMA3_PATTERN, "<|eot_id|>"),
    "qwen3": Vocabulary(splintr.QWEN2_PATTERN, "<|im_end|>", nfc=True),
    "kimi_k2": Vocabulary(splintr.KIMI_PATTERN, "<|im_end|>"),
    "mistral_v3": Vocabulary(splintr.MISTRAL_V3_PATTERN, "</s>", first=1000),
    "phi4": Vocabulary(splintr.LLAMA3_PATTERN, "<|im_end|>"),
}
SENTENCEPIECE = {
    "llama2": Vocabulary(None, "</s>", dummy_space=True),
    "mistral_v1": Vocabulary(None, "</s>", dummy_space=True),
    "gemma2": Vocabulary(None, "<eos>"),
    "gemma3": Vocabulary(None, "<eos>"),
    "gemma4": Vocabulary(None, "<eos>"),
}
VOCABULARIES = BYTE_LEVEL | SENTENCEPIECE


class Real(NamedTuple):
    """A vocabulary as a tokenizer; `pieces` and `encode` are what splintr has of it."""

    tokenizer: Tokenizer
    pieces: dict[int, bytes]  # special tokens as they are written
    encode: Callable[[str], list[int]]  # without special tokens
    special: frozenset[int]
    end: int


@cache
def published(name: str) -> Real:
    known = splintr.Tokenizer.from_pretrained(name)
    about = VOCABULARIES[name]
    size = splintr.base_vocab_size(name)
    special = {text: number for text, number in known.special_tokens().items() if number < size}
    for number in {*range(about.first)} - {*special.values()}:
        special[f"<SPECIAL_{number}>"] = number  # as the published file names them
    special = dict(sorted(special.items(), key=lambda item: item[1]))
    make = _byte_level if about.pattern else _sentencepiece
    tokenizer = make(known, about, size, special)
    for text, number in special.items():
        assert tokenizer.token_to_id(text) == number, (name, text)
    pieces = {number: text.encode() for text, number in special.items()}
    for number in tokenizer.get_vocab().values():
        if number not in pieces:
            piece = known.decode_token_bytes(number)
            pieces[number] = piece if about.pattern else piece.replace(SPACE.encode(), b" ")
    ids = frozenset(special.values())
    return Real(tokenizer, pieces, known.encode_ordinary, ids, special[about.end])


def _byte_level(
    known: splintr.AnyTokenizer, about: Vocabulary, size: int, special: dict[str, int]
) -> Tokenizer:
    numbers = [number for number in range(about.first, size) if number not in special.values()]
    tokens: dict[int, bytes] = {}
    for number in numbers:
        with suppress(ValueError):  # ids without a token
            tokens[number] = known.decode_token_bytes(number)
    tokens = {number: token for number, token in tokens.items() if token}
    vocab = {_spelled(token): number for number, token in tokens.items()}
    merges = [(_spelled(one), _spelled(two)) for one, two in merges_of([*tokens.values()])]
    tokenizer = Tokenizer(models.BPE(vocab=vocab | special, merges=merges, ignore_merges=True))
    if about.nfc:
        tokenizer.normalizer = normalizers.NFC()
    assert about.pattern is not None
    tokenizer.pre_tokenizer = splitters.Sequence(
        [
            splitters.Split(Regex(about.pattern), "isolated"),
            splitters.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return tokenizer


def _spelled(token: bytes) -> str:
    return "".join(SPELLED[byte] for byte in token)


def _sentencepiece(
    known: splintr.AnyTokenizer, about: Vocabulary, size: int, special: dict[str, int]
) -> Tokenizer:
    vocab = dict(special)
    single: dict[int, int] = {}  # tokens of one byte, of which the first 256 are the bytes
    for number in range(size):
        token = known.decode_token_bytes(number)
        if number in special.values() or not token:
            continue
        if len(token) == 1 and token[0] not in single and len(single) == token[0]:
            single[token[0]] = number
            vocab[f"<0x{token[0]:02X}>"] = number
        else:
            vocab.setdefault(token.decode().replace(" ", SPACE), number)
    assert len(single) == 256
    model = models.BPE(
        vocab=vocab,
        merges=_pairs(vocab, set(special)),
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    first = [normalizers.Prepend(SPACE)] if about.dummy_space else []
    tokenizer.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", SPACE)])
    last = [decoders.Strip(" ", 1, 0)] if about.dummy_space else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *last]
    )
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return tokenizer


def _pairs(vocab: dict[str, int], special: set[str]) -> list[tuple[str, str]]:
    """Return the merges in the order in which SentencePiece prefers their results."""
    merges = []
    for text in sorted(vocab, key=vocab.__getitem__):
        if text in special or text.startswith("<0x"):
            continue
        pairs = [(text[:place], text[place:]) for place in range(1, len(text))]
        pairs = [(one, two) for one, two in pairs if one in vocab and two in vocab]
        merges += sorted(pairs, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
    return merges
